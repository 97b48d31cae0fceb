//! Workloads measured on a double whose tools print what is known.

use std::time::Duration;

use crate::double::{Behaviour, Double, Ended, IMAGE, Tool};
use sandboxer_bench::workload::measure::{WorkloadError, measure};
use sandboxer_bench::workload::native::Native;
use sandboxer_bench::workload::output::example;
use sandboxer_bench::workload::plan::{Plan, series};
use sandboxer_bench::workload::power::Meter;
use sandboxer_probe::measure::{Bench, recipe};
use sandboxer_probe::options::Network;
use sandboxer_probe::sample::Outcome;
use sandboxer_probe::startup::PlanError;
use sandboxer_probe::workload::definition::Format;
use sandboxer_probe::workload::definition::{self, Profile};
use sandboxer_probe::workload::report::{Report, SCHEMA_TEXT, render};
use sandboxer_probe::workload::run::Run;
use sandboxer_probe::workload::store::{self, Store};
use tokio_util::sync::CancellationToken;

/// Facts as the helper prints them.
fn facts(cpus: u32) -> String {
    format!(
        "{{\"bench_facts\":{{\"cpus\":{cpus},\"quota_cpus\":null,\"memory_limit\":536870912,\
         \"memory_total\":1073741824,\"kernel\":\"6.1\"}}}}\n"
    )
}

/// Returns the output of a container with this many processors for a command of the probe.
fn with_cpus(cpus: u32, command: &[String]) -> Ended {
    let words: Vec<&str> = command.iter().map(String::as_str).collect();
    let output_of = |format: Format| (0, example(format).to_owned(), facts(cpus));
    Some(match words[..] {
        ["bench-helper", "facts"] => (0, facts(cpus), String::new()),
        [.., "--", "sysbench", "cpu", _, _, _, _] => output_of(Format::SysbenchCpu),
        [.., "--", "redis-benchmark", _, _, _, _, _, _, _, _, _] => output_of(Format::RedisBenchmark),
        [.., "--announce=6379", "--", "redis-server", _, _, _, _, _, _] => {
            (0, String::new(), format!("{}{{\"bench_listening\":6379}}\n", facts(cpus)))
        }
        _ => panic!("no such command: {words:?}"),
    })
}

fn works(command: &[String]) -> Ended {
    with_cpus(2, command)
}

fn has_one_less(command: &[String]) -> Ended {
    with_cpus(1, command)
}

/// Has the limits, but sees the host's memory and no limit.
fn hides_its_limits(command: &[String]) -> Ended {
    let (code, stdout, stderr) = works(command)?;
    let hidden = |text: String| text.replace("536870912", "null").replace("1073741824", "68719476736");
    Some((code, hidden(stdout), hidden(stderr)))
}

/// Same as [`works`], but the tool's part is something else.
fn tool_is(command: &[String], ended: Ended) -> Ended {
    if command.contains(&"facts".to_owned()) { works(command) } else { ended }
}

fn is_killed(command: &[String]) -> Ended {
    tool_is(command, Some((137, "half an outp".into(), format!("{}FATAL: out of memory\n", facts(2)))))
}

fn prints_garbage(command: &[String]) -> Ended {
    tool_is(command, Some((0, "events per second: lots\n".into(), facts(2))))
}

fn hangs(command: &[String]) -> Ended {
    tool_is(command, None)
}

fn changes_its_mind(command: &[String]) -> Ended {
    tool_is(command, with_cpus(1, command))
}

fn tool(tool: Tool) -> Behaviour {
    Behaviour { tool: Some(tool), ..Behaviour::default() }
}

/// Returns one thread of sysbench cpu, which takes no time here.
fn plan(probe: &str, runtimes: &[&str], repeat: u32) -> Plan {
    let mut probe = definition::all().into_iter().find(|known| known.name == probe).unwrap();
    probe.quick.takes = 0.001;
    probe.cases.truncate(1);
    Plan {
        runtimes: runtimes.iter().map(|&name| name.to_owned()).collect(),
        native: None,
        vm: None,
        client_runtime: "client".into(),
        probes: vec![probe],
        profile: Profile::Quick,
        repeat,
        warm_up: 1,
        cpus: 2,
        memory: 512 << 20,
        volumes: std::env::temp_dir(),
        recipe: recipe(IMAGE, Network::Pod, Duration::from_millis(600)),
        trusted: Vec::new(),
        build_image: "double/build:1".into(),
        meter: Meter::None("a double has none".into()),
    }
}

async fn run(double: &Double, plan: &Plan) -> Result<(Report, Vec<Run>), WorkloadError> {
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    measure(&bench, plan, None, &CancellationToken::new(), &mut |_| ()).await
}

fn assert_valid(report: &Report) {
    let schema = serde_json::from_str(SCHEMA_TEXT).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let value = serde_json::from_str(&render(report).unwrap()).unwrap();
    let faults: Vec<String> =
        validator.iter_errors(&value).map(|fault| format!("{}: {fault}", fault.instance_path())).collect();
    assert!(faults.is_empty(), "{faults:#?}");
}

#[tokio::test]
async fn runtimes_alternate_and_equal_ones_show_no_difference() {
    let double = Double::serve([("a", tool(works)), ("b", tool(works))]);
    let (report, runs) = run(&double, &plan("cpu", &["a", "b"], 4)).await.unwrap();
    // One look inside each, then rounds of both, the first of them to warm up; each of the others begins with the next one.
    let order = double.truth(|truth| truth.runs.concat());
    assert_eq!(order, ["ab", "ab", "ab", "ba", "ab", "ba"].concat());
    assert_eq!(runs.iter().filter(|run| run.warm_up).count(), 2);
    let of_b = report
        .series
        .iter()
        .find(|series| series.runtime == "b" && series.metric.name == "events_per_s")
        .unwrap();
    assert_eq!((of_b.n, of_b.failures, of_b.p50), (4, 0, Some(841.02)));
    assert!(report.over_reference(of_b).unwrap().ratio.shows_no_difference());
    assert_eq!(report.threads, 2);
    assert!(report.notes.iter().any(|note| note.starts_with("quick")));
    assert!(double.truth(|truth| truth.pods.is_empty()));
    assert_valid(&report);
}

#[tokio::test]
async fn the_same_handler_twice_is_two_series_that_show_no_difference() {
    let double = Double::serve([("a", tool(works))]);
    let runtimes = series(&["a".to_owned(), "a".to_owned()]);
    let (report, runs) = run(&double, &Plan { runtimes, ..plan("cpu", &[], 4) }).await.unwrap();
    assert_eq!(double.truth(|truth| truth.runs.clone()), ["a"; 12]);
    let count = |name: &str| runs.iter().filter(|run| run.runtime == name).count();
    assert_eq!((count("a"), count("a#2"), &*report.reference), (5, 5, "a"));
    // The double's tool always prints the same: two metrics, none differs.
    assert_eq!(report.no_difference()["a#2"], (2, 2));
    assert!(report.notes.iter().any(|note| note.starts_with("a#2: 2 of 2 metrics show no difference")));
    assert_valid(&report);
}

#[tokio::test]
async fn each_run_has_cpu_time_by_role_and_says_why_there_is_no_power() {
    let double = Double::serve([("a", tool(works))]);
    let (report, runs) = run(&double, &plan("cpu", &["a"], 2)).await.unwrap();
    assert!(runs.iter().all(|run| run.cpu.is_some() && run.power.watts.is_none()), "{runs:?}");
    assert_eq!(report.costs[0].n, 2);
    assert_eq!(report.not_measured["power"], "a double has none");
    assert_valid(&report);
}

#[tokio::test]
async fn a_probe_whose_image_or_memory_is_missing_fails_by_itself() {
    let double = Double::serve([("a", tool(works))]);
    let mut both = plan("cpu", &["a"], 1);
    both.probes.extend(plan("pipeline", &["a"], 1).probes);
    let (report, runs) = run(&double, &both).await.unwrap();
    let pipeline: Vec<&Run> = runs.iter().filter(|run| run.probe == "pipeline").collect();
    assert!(
        pipeline.iter().all(|run| run.failed_at == "image" && run.error.contains("bench-build")),
        "{pipeline:?}"
    );
    assert!(runs.iter().filter(|run| run.probe == "cpu").all(|run| run.outcome == Outcome::Ok));
    assert!(report.not_measured["pipeline.a.total_s"].contains("double/build:1 is not on the node"));

    let small = Plan { profile: Profile::Paper, build_image: IMAGE.into(), ..plan("pipeline", &["a"], 1) };
    let (_, runs) = run(&double, &small).await.unwrap();
    assert!(runs.iter().all(|run| run.failed_at == "memory" && run.error.contains("needs 1024")), "{runs:?}");
    // Only the look inside.
    assert_eq!(double.truth(|truth| truth.runs.len()), 4);
}

#[tokio::test]
async fn a_volume_that_cannot_be_made_is_a_failure_of_its_row() {
    let double = Double::serve([("a", tool(works))]);
    let (_, runs) = run(&double, &Plan { volumes: "/no/such/dir".into(), ..plan("mixed-files", &["a"], 1) })
        .await
        .unwrap();
    assert!(
        runs.iter().all(|run| run.failed_at == "volume" && run.error.contains("/no/such/dir")),
        "{runs:?}"
    );
}

#[tokio::test]
async fn a_server_runs_under_test_and_its_client_elsewhere() {
    let double = Double::serve([("tested", tool(works)), ("client", tool(works))]);
    let (report, runs) = run(&double, &plan("redis", &["tested"], 1)).await.unwrap();
    let order = double.truth(|truth| truth.runs.clone());
    assert_eq!(order, ["tested", "tested", "client", "tested", "client"]);
    assert!(runs[1].commands.tool.contains(&"192.0.2.1".to_owned()));
    assert_eq!(report.series[0].p50, Some(13306.72));
    assert_valid(&report);
}

#[tokio::test]
async fn unequal_sides_are_refused_before_anything_runs() {
    let double = Double::serve([("a", tool(works)), ("b", tool(has_one_less))]);
    let error = run(&double, &plan("cpu", &["a", "b"], 4)).await.unwrap_err();
    assert!(
        matches!(&error, WorkloadError::Unequal(_))
            && error.to_string().contains("2 effective CPUs against 1")
    );
    assert_eq!(double.truth(|truth| truth.runs.len()), 2);
}

#[tokio::test]
async fn a_runtime_that_hides_its_limits_is_compared_only_if_it_is_said_and_the_result_says_so() {
    let double = Double::serve([("a", tool(works)), ("hides", tool(hides_its_limits))]);
    let refused = run(&double, &plan("cpu", &["a", "hides"], 1)).await.unwrap_err();
    assert!(refused.to_string().contains("--trust-limits"), "{refused}");
    let trusting = Plan { trusted: vec!["hides".into()], ..plan("cpu", &["a", "hides"], 1) };
    let (report, runs) = run(&double, &trusting).await.unwrap();
    assert!(runs.iter().all(|run| run.outcome == Outcome::Ok), "{runs:?}");
    assert_eq!(report.sides["hides"].memory_limit, Some(512 << 20));
    assert!(
        report.notes.iter().any(|note| note.starts_with("hides: its containers do not see their limits"))
    );
}

#[tokio::test]
async fn each_failure_is_named_and_the_others_go_on() {
    let cases: [(Tool, &str, &str); 4] = [
        (is_killed, "tool", "exit code 137; its last output: FATAL: out of memory"),
        (prints_garbage, "output", "is 'lots', expected a number"),
        (hangs, "tool", "did not finish within"),
        (changes_its_mind, "facts", "other resources than the first: 2 effective CPUs against 1"),
    ];
    for (bad, at, why) in cases {
        let double = Double::serve([("bad", tool(bad)), ("good", tool(works))]);
        let (report, runs) = run(&double, &plan("cpu", &["bad", "good"], 1)).await.unwrap();
        let failed: Vec<&Run> = runs.iter().filter(|run| run.outcome == Outcome::Failed).collect();
        assert_eq!(failed.len(), 2, "{at}");
        assert!(
            failed.iter().all(|run| run.runtime == "bad" && run.figures.is_empty() && run.failed_at == at)
        );
        assert!(failed[0].error.contains(why), "{}", failed[0].error);
        let absent = &report.not_measured["cpu.one-thread.bad.events_per_s"];
        assert!(absent.contains(why), "{absent}");
        assert_eq!(report.failures(&runs), 1, "the warm-up is counted");
        let good = report.series.iter().find(|series| series.runtime == "good").unwrap();
        assert_eq!((good.n, good.p50), (1, Some(841.02)));
        assert!(double.truth(|truth| truth.pods.is_empty()));
        assert_valid(&report);
    }
}

#[tokio::test]
async fn a_runtime_that_never_answers_fails_by_itself() {
    let double = Double::serve([("never", Behaviour { never: true, ..tool(works) }), ("good", tool(works))]);
    let (report, runs) = run(&double, &plan("cpu", &["never", "good"], 1)).await.unwrap();
    let never: Vec<&Run> = runs.iter().filter(|run| run.runtime == "never").collect();
    assert!(never.iter().all(|run| run.failed_at == "RunPodSandbox"), "{never:?}");
    assert!(report.notes.iter().any(|note| note.starts_with("never: cannot read a container")));
    assert!(runs.iter().filter(|run| run.runtime == "good").all(|run| run.outcome == Outcome::Ok));
}

#[tokio::test]
async fn an_end_in_between_keeps_what_was_measured() {
    let double = Double::serve([("a", tool(works))]);
    let bench = Bench::open(&double.endpoint(), None).unwrap();
    let (dir, cancel) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    let mut store = Store::create(&dir.path().join("result")).unwrap();
    let (mut seen, stop) = (0, cancel.clone());
    let mut progress = |_: &Run| {
        seen += 1;
        if seen == 3 {
            stop.cancel();
        }
    };
    let plan = plan("cpu", &["a"], 50);
    let (report, runs) = measure(&bench, &plan, Some(&mut store), &cancel, &mut progress).await.unwrap();
    assert_eq!((report.partial_reason.as_deref(), runs.len()), (Some("interrupted"), 3));
    let store::Loaded { report: read, runs: rows, .. } = store::load(store.dir()).unwrap();
    assert_eq!((read, rows), (report, runs));
    assert_eq!(std::fs::read_dir(store.dir().join("outputs")).unwrap().count(), 3);
    assert!(Store::create(store.dir()).is_err(), "a result was to be overwritten");
    assert!(double.truth(|truth| truth.pods.is_empty()));
}

#[tokio::test]
async fn what_is_not_there_is_named_before_anything_starts() {
    let double = Double::serve([("a", tool(works)), ("client", tool(works))]);
    let mut without_image = plan("cpu", &["a"], 1);
    without_image.recipe.image = "no/such:image".into();
    let error = run(&double, &without_image).await.unwrap_err();
    assert!(error.to_string().contains("make bench-image"), "{error}");
    let error = run(&double, &plan("cpu", &["b"], 1)).await.unwrap_err();
    assert!(matches!(error, WorkloadError::Plan(PlanError::NoHandler { .. })), "{error}");
    let mut of_host = plan("redis", &["a"], 1);
    of_host.recipe.network = Network::Host;
    assert!(matches!(run(&double, &of_host).await.unwrap_err(), WorkloadError::HostNetwork(_)));
    assert!(double.truth(|truth| truth.runs.is_empty()));
}

/// An unpacked image whose helper is a script that prints facts and then `prints`, and control groups that are directories.
fn double_native(dir: &std::path::Path, prints: &str) -> Native {
    use std::os::unix::fs::PermissionsExt;
    let (bin, groups) = (dir.join("image/usr/bin"), dir.join("groups"));
    std::fs::create_dir_all(&bin).unwrap();
    std::fs::create_dir_all(&groups).unwrap();
    std::fs::write(groups.join("cgroup.controllers"), "cpu memory").unwrap();
    std::fs::write(dir.join("facts"), facts(2)).unwrap();
    std::fs::write(dir.join("example"), example(Format::SysbenchCpu)).unwrap();
    let script = format!(
        "#!/bin/sh\necho \"$@\" >>{0}/calls\ncase \"$*\" in *'bench-helper facts') exec cat {0}/facts;; esac\n\
         cat {0}/facts >&2\n{prints}\n",
        dir.display()
    );
    let helper = bin.join("bench-helper");
    std::fs::write(&helper, script).unwrap();
    std::fs::set_permissions(&helper, std::fs::Permissions::from_mode(0o755)).unwrap();
    Native { groups, ..Native::new(dir.join("image"), None) }
}

#[tokio::test]
async fn the_native_series_runs_on_the_host_and_is_the_reference() {
    let double = Double::serve([("a", tool(works))]);
    let dir = tempfile::tempdir().unwrap();
    let example = format!("exec cat {}/example", dir.path().display());
    let native = Some(double_native(dir.path(), &example));
    let plan = Plan { native, ..plan("cpu", &["native", "a"], 4) };
    let (report, runs) = run(&double, &plan).await.unwrap();
    // The runtime was asked for the other series alone.
    assert_eq!(double.truth(|truth| truth.runs.clone()), ["a"; 6]);
    assert_eq!(report.reference, "native");
    let native: Vec<&Run> = runs.iter().filter(|run| run.runtime == "native").collect();
    assert_eq!(native.len(), 5);
    assert!(native.iter().all(|run| run.figures["events_per_s"] == 841.02), "{native:?}");
    let calls = std::fs::read_to_string(dir.path().join("calls")).unwrap();
    let last = calls.lines().last().unwrap();
    assert!(
        last.contains("native --root")
            && last.contains("--cgroup")
            && last.ends_with("sysbench cpu --cpu-max-prime=10000 --threads=1 --time=3 run"),
        "{last}"
    );
    let groups: Vec<_> = std::fs::read_dir(dir.path().join("groups")).unwrap().flatten().collect();
    let limits = groups.iter().find(|group| group.path().is_dir()).unwrap().path();
    assert_eq!(std::fs::read_to_string(limits.join("cpu.max")).unwrap(), "200000 100000");
    assert_valid(&report);
}

#[tokio::test]
async fn a_native_tool_that_is_killed_or_hangs_is_a_failure_with_its_reason() {
    let cases = [
        ("echo FATAL: full >&2; kill -9 $$", "exit code 137; its last output: FATAL: full"),
        ("exec sleep 600", "did not finish within"),
    ];
    for (prints, why) in cases {
        let double = Double::serve([("a", tool(works))]);
        let dir = tempfile::tempdir().unwrap();
        let native = Some(double_native(dir.path(), prints));
        let (report, runs) = run(&double, &Plan { native, ..plan("cpu", &["native"], 1) }).await.unwrap();
        assert!(runs.iter().all(|run| run.outcome == Outcome::Failed && run.error.contains(why)), "{runs:?}");
        assert!(report.not_measured["cpu.one-thread.native.events_per_s"].contains(why));
    }
}

#[tokio::test]
async fn native_without_its_image_is_refused_before_anything_starts() {
    let double = Double::serve([("a", tool(works))]);
    let error = run(&double, &plan("cpu", &["native", "a"], 1)).await.unwrap_err().to_string();
    assert!(error.contains("--native-root"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let native = Some(Native::new(dir.path().to_owned(), None));
    let error = run(&double, &Plan { native, ..plan("cpu", &["native"], 1) }).await.unwrap_err().to_string();
    assert!(error.contains("make bench-native"), "{error}");
    assert!(double.truth(|truth| truth.runs.is_empty()));
}
