//! Real programs of Debian, under runc and under sandboxer: what a program prints and how it ends must be the same.
//! A difference is either in `KNOWN`, with its reason, or fails the program; so does a program that does not work beside runc.
//!
//! Only with `SANDBOXER_E2E_PROGRAMS=1`, which `make test-programs` sets; elsewhere the cases are counted as ignored. `programs::redis` is
//! the case of `redis.sh`; `SANDBOXER_E2E_ONLY=redis,nginx` selects some. `SANDBOXER_E2E_HANDLERS=runc` compares runc with itself: what differs or fails then is the script's own fault.
//! `SANDBOXER_E2E_TABLE=docs/compatibility.md` writes what ran into the table of that document.

mod hierarchies;
mod judged;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use hierarchies::Hierarchies;
use judged::{Ending, Row, judge, put_into};
use k8s_cri::v1::{Capability, ContainerConfig, ContainerState, Int64Value};
use libtest_mimic::{Arguments, Trial};
use sandboxer_e2e::case::{Case, Container, Logs, Pod, privileged, security, shell};
use sandboxer_e2e::cri::Cri;
use sandboxer_e2e::eventually;
use sandboxer_e2e::stack::Stack;
use tokio::runtime::Runtime;

/// Longest time of a program: emulated guests run a tenth as fast as the host, beside others.
const LIMIT: Duration = Duration::from_secs(1200);

/// Programs at once: each guest keeps about one core busy.
const AT_ONCE: usize = 2;

/// What a program may do.
#[derive(Clone, Copy, PartialEq)]
enum Rights {
    /// The privileges of a container by default.
    Default,
    /// User 33, without capabilities.
    User,
    /// A container that may administer its pod.
    Privileged,
    /// As that, and systemd is the container's init.
    Systemd,
}

struct Program {
    name: &'static str,
    script: &'static str,
    /// What is done with it, for the table.
    what: &'static str,
    image: &'static str,
    rights: Rights,
    memory: &'static str,
}

/// `programs![name rights image memory: "what", …]`; the script is `name.sh`.
macro_rules! programs {
    ($($name:ident $rights:ident $image:literal $memory:literal: $what:literal),+ $(,)?) => {
        &[$(Program {
            name: stringify!($name),
            script: include_str!(concat!(stringify!($name), ".sh")),
            what: $what,
            image: $image,
            rights: Rights::$rights,
            memory: $memory,
        }),+]
    };
}

/// All programs, cheap ones first.
const PROGRAMS: &[Program] = programs![
    tmpfs Privileged "programs" "256Mi": "mount, limits of bytes and inodes, remount, bind read-only",
    unshare Privileged "programs" "256Mi": "every namespace, as root and as a user; two network namespaces with a link",
    loop_mount Privileged "programs" "256Mi": "ext4 in a file, mounted by a loop device, checked and mounted again",
    fuse Privileged "programs" "256Mi": "squashfuse mounts what mksquashfs made",
    strace Default "programs" "256Mi": "follow forks, attach, inject an error, count",
    git Default "programs" "256Mi": "commits, a merge, gc, fsck, clone, stash, worktree",
    redis Default "programs" "256Mi": "commands, a script, a snapshot by fork, a restart with its log",
    nginx User "programs" "256Mi": "as a user on port 80: sendfile, a proxy, a reload",
    gcc Default "programs" "512Mi": "make -j4 of 13 files, and the program with threads",
    sshd Default "programs" "256Mi": "keys, exit codes, a terminal, a forwarded port",
    rsync Default "programs" "256Mi": "over ssh: hard links, owners, sparse files, deletions",
    gdb Default "programs" "512Mi": "a backtrace of a crash, a breakpoint, a hardware watchpoint, attach, a core file",
    cron Default "programs" "256Mi": "a user's job runs at the minute",
    python Default "programs" "512Mi": "venv with pip, multiprocessing, threads, SQLite with a WAL, http.server",
    postgresql Default "programs" "512Mi": "initdb, tables, a parallel query, vacuum, recovery after an immediate stop",
    systemd Systemd "programs" "512Mi": "as PID 1: state of the system, transient services with limits, a timer, the journal",
    node Default "programs-large" "512Mi": "a worker thread, fs.watch, an HTTP server, a child process",
    java Default "programs-large" "768Mi": "compile and run: parallel streams, sockets, garbage collection, out of heap",
    mariadb Default "programs-large" "768Mi": "install, InnoDB tables, a rollback, shutdown",
    podman Privileged "programs-large" "768Mi": "import, build, run with a memory limit, exec, stop",
    docker Privileged "programs-large" "1Gi": "dockerd by its own start script: build, memory limits, port map, exec, link, stop",
];

/// What differs and is meant; or does not work beside runc on the host of the tests. `*` at the end stands for anything.
struct Known {
    program: &'static str,
    runc: &'static str,
    ours: &'static str,
    why: &'static str,
}

const KNOWN: &[Known] = &[];

/// What all cases have in common.
struct Suite {
    /// The handler that is compared with runc.
    subject: &'static str,
    runtime: Runtime,
    stack: Arc<Stack>,
    cri: Cri,
    /// Images that containerd has.
    loaded: Mutex<BTreeSet<&'static str>>,
    /// What the host has of control groups, before and after each program beside runc; one of these at a time.
    hierarchies: Mutex<Hierarchies>,
    rows: Mutex<Vec<Row>>,
}

fn main() -> ExitCode {
    match run(Arguments::from_args()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<ExitCode> {
    let is_enabled = std::env::var_os("SANDBOXER_E2E_PROGRAMS").is_some();
    let only = std::env::var("SANDBOXER_E2E_ONLY").unwrap_or_default();
    let only: Vec<_> = only.split([',', ' ']).filter(|name| !name.is_empty()).collect();
    if let Some(unknown) = only.iter().find(|name| !PROGRAMS.iter().any(|program| program.name == **name)) {
        bail!("SANDBOXER_E2E_ONLY: no program {unknown}");
    }
    let programs = || PROGRAMS.iter().filter(|program| only.is_empty() || only.contains(&program.name));
    let name = |program: &Program| format!("programs::{}", program.name);
    let is_idle = |program: &Program| arguments.is_filtered_out(&Trial::test(name(program), || Ok(())));
    if arguments.list || !is_enabled || programs().all(is_idle) {
        let idle = |program: &Program| Trial::test(name(program), || Ok(())).with_ignored_flag(!is_enabled);
        return Ok(libtest_mimic::run(&arguments, programs().map(idle).collect()).exit_code());
    }
    let suite = Arc::new(Suite::up()?);
    let trial = |program: &'static Program| {
        let suite = Arc::clone(&suite);
        Trial::test(name(program), move || {
            suite.compare(program).map_err(|error| format!("{error:#}").into())
        })
    };
    let trials = programs().map(trial).collect();
    let arguments = Arguments { test_threads: arguments.test_threads.or(Some(AT_ONCE)), ..arguments };
    let conclusion = libtest_mimic::run(&arguments, trials);
    Arc::into_inner(suite).context("a case still holds the stack")?.down()?;
    Ok(conclusion.exit_code())
}

impl Suite {
    fn up() -> Result<Self> {
        let began = Instant::now();
        let hierarchies = Hierarchies::now()?;
        let subject = match std::env::var("SANDBOXER_E2E_HANDLERS").as_deref() {
            Ok("runc") => "runc",
            _ => "sandboxer",
        };
        let stack = Stack::up(subject == "sandboxer").context("cannot start the stack")?;
        let runtime = Runtime::new()?;
        let cri = runtime.block_on(async { Cri::connect(stack.containerd_socket()?) })?;
        println!(
            "stack of this run: {}, up in {:.1} s",
            stack.dir().display(),
            began.elapsed().as_secs_f64()
        );
        Ok(Self {
            subject,
            runtime,
            stack: Arc::new(stack),
            cri,
            loaded: Mutex::default(),
            hierarchies: Mutex::new(hierarchies),
            rows: Mutex::default(),
        })
    }

    /// Runs a program under both, and compares.
    fn compare(&self, program: &'static Program) -> Result<()> {
        self.load(program.image)?;
        let [runc, ours] = ["runc", self.subject].map(|handler| Case {
            stack: Arc::clone(&self.stack),
            cri: self.cri.clone(),
            handler,
            name: format!("programs-{}", program.name.replace('_', "-")),
        });
        // One after the other: the control, native, would otherwise slow down what it is compared with.
        let (runc, left) = self.control(&runc, program)?;
        let ours = self.runtime.block_on(ending(&ours, program));
        let mut row = judge(program, &runc, &ours);
        if !left.is_empty() {
            row.errors.push(format!(
                "beside runc it left hierarchies of control groups on the host: {}",
                left.join(", ")
            ));
        }
        println!("{}: runc {}, {} {}", program.name, runc.summary(), self.subject, ours.summary());
        let errors = row.errors.join("\n");
        let is_fine = row.errors.is_empty();
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        // Now, so that a run that is ended early has told what it knows.
        if let Some(document) = std::env::var_os("SANDBOXER_E2E_TABLE")
            && self.subject == "sandboxer"
        {
            put_into(document.as_ref(), std::slice::from_ref(&row))?;
        }
        rows.push(row);
        drop(rows);
        ensure!(is_fine, "{errors}\n--- runc\n{}--- {}\n{}", runc.all(), self.subject, ours.all());
        Ok(())
    }

    /// Runs a program beside runc, and removes what hierarchies of control groups it leaves on the host; returns their names, too.
    fn control(&self, case: &Case, program: &Program) -> Result<(Ending, Vec<String>)> {
        let before = self.hierarchies.lock().unwrap_or_else(PoisonError::into_inner);
        let ending = self.runtime.block_on(ending(case, program));
        Ok((ending, before.restore()?))
    }

    /// Makes an image, if it is not in the cache, and loads it.
    fn load(&self, image: &'static str) -> Result<()> {
        // Held across it: whoever needs the image waits for it.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if !loaded.contains(image) {
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/programs-image.sh");
            let made =
                Command::new(script).arg(image).stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
            ensure!(made.status.success(), "scripts/programs-image.sh {image}: {}", made.status);
            let archive = String::from_utf8(made.stdout)?;
            let mut import = self.stack.command("ctr");
            let imported = import.args(["images", "import", archive.trim()]).output()?;
            ensure!(
                imported.status.success(),
                "ctr images import: {}",
                String::from_utf8_lossy(&imported.stderr)
            );
            loaded.insert(image);
        }
        Ok(())
    }

    /// Takes the stack down.
    fn down(self) -> Result<()> {
        let Self { runtime, stack, cri, rows, hierarchies, .. } = self;
        let rows = rows.into_inner().unwrap_or_else(PoisonError::into_inner);
        let hierarchies = hierarchies.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut left = runtime.block_on(stack.left())?;
        left.extend(
            hierarchies.restore()?.into_iter().map(|name| format!("the hierarchy {name} of control groups")),
        );
        if !left.is_empty() || rows.iter().any(|row| !row.errors.is_empty()) {
            eprintln!("{}", stack.log_tails(15));
        }
        drop((cri, runtime));
        let down = Arc::into_inner(stack).context("a case still holds the stack")?.down();
        ensure!(left.is_empty(), "left after every pod was removed: {}", left.join(", "));
        down
    }
}

/// Runs a program to its end, and removes its pod.
async fn ending(case: &Case, program: &Program) -> Ending {
    let began = Instant::now();
    let ended = run_program(case, program).await;
    let took = began.elapsed();
    let cleaned = case.clean_up().await.context("cannot clean up");
    let ended = ended.and_then(|ended| cleaned.map(|()| ended));
    ended.map_or_else(
        |error| Ending { exit: None, stdout: String::new(), stderr: format!("{error:#}\n"), took },
        |(exit, stdout, stderr)| Ending { exit: Some(exit), stdout, stderr, took },
    )
}

async fn run_program(case: &Case, program: &Program) -> Result<(i32, String, String)> {
    let pod = case
        .pod_with(|config| {
            config.annotations.insert("io.sandboxer.memory".into(), program.memory.into());
            config.annotations.insert("io.sandboxer.vcpus".into(), "2".into());
            if matches!(program.rights, Rights::Privileged | Rights::Systemd) {
                privileged(config);
            }
        })
        .await
        .context("cannot start the pod")?;
    let script = format!("{}{}", include_str!("prelude.sh"), program.script);
    if program.rights == Rights::Systemd {
        return exec_beside_systemd(case, &pod, program, &script).await;
    }
    let container = pod.start(config(program, &script)).await.context("cannot start the container")?;
    let status = eventually("end of the program", LIMIT, || async {
        let status = container.status().await?;
        Ok((status.state() == ContainerState::ContainerExited).then_some(status))
    })
    .await;
    match status {
        Ok(status) => {
            let Logs { stdout, stderr, .. } = container.logs()?;
            Ok((status.exit_code, stdout, stderr))
        }
        Err(error) => Err(with_logs(error, &container)),
    }
}

fn with_logs(error: anyhow::Error, container: &Container) -> anyhow::Error {
    let logs = container.logs().unwrap_or_default();
    anyhow!("{error:#}; so far:\n{}\n{}", logs.stdout, logs.stderr)
}

fn config(program: &Program, script: &str) -> ContainerConfig {
    let mut config = shell("program", "");
    config.command = ["bash", "-c", script].map(str::to_owned).into();
    config.image.get_or_insert_default().image = format!("localhost/sandboxer/{}:latest", program.image);
    let context = security(&mut config);
    match program.rights {
        Rights::Default => {}
        Rights::User => {
            context.run_as_user = Some(Int64Value { value: 33 });
            context.capabilities =
                Some(Capability { drop_capabilities: vec!["ALL".into()], ..Default::default() });
        }
        Rights::Privileged | Rights::Systemd => context.privileged = true,
    }
    config
}

/// Units that would change the node beside runc, where the kernel is the node's.
const MASKED: &str = "for unit in systemd-sysctl systemd-modules-load; do ln -s /dev/null /etc/systemd/system/$unit.service; done; \
                      export container=oci; exec /sbin/init";

async fn exec_beside_systemd(
    case: &Case,
    pod: &Pod,
    program: &Program,
    script: &str,
) -> Result<(i32, String, String)> {
    let container = pod.start(config(program, MASKED)).await.context("cannot start the container")?;
    let answer = case.cri.exec_sync(&container.id, &["bash", "-c", script], Some(LIMIT)).await;
    let answer = match answer {
        Ok(answer) => answer,
        Err(status) => return Err(with_logs(status.into(), &container)),
    };
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).context("output");
    Ok((answer.exit_code, text(answer.stdout)?, text(answer.stderr)?))
}
