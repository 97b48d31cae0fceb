//! Random sequences of requests about a pod's containers, and how a sequence that fails is made shorter.

use std::collections::BTreeMap;
use std::fmt;

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

/// Containers of a sequence at once.
const CONTAINERS: usize = 2;
/// Execs of a container at once.
const EXECS: usize = 2;
/// Steps of the longest sequence.
const LONGEST: usize = 14;

/// What a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// Exits with 7 on SIGTERM.
    Traps,
    /// Has no handler for any signal.
    Deaf,
    /// Exits with 4 at the end of its input.
    Reads,
    /// Exits with 5 at once.
    Quick,
    /// Writes more than a FIFO holds, then exits with 3.
    Floods,
    /// Has a child that is killed for its memory, then exits with 9.
    Eats,
    /// Exits with 6 and leaves a child.
    Leaves,
    /// Is no file of the image.
    Missing,
}

impl Program {
    const ALL: [Self; 8] = [
        Self::Traps,
        Self::Deaf,
        Self::Reads,
        Self::Quick,
        Self::Floods,
        Self::Eats,
        Self::Leaves,
        Self::Missing,
    ];

    /// Returns its command line.
    pub fn args(self) -> Vec<String> {
        let script = match self {
            Self::Traps => "trap 'exit 7' TERM; echo ready; while :; do sleep 1000 & wait $!; done",
            Self::Deaf => "echo ready; exec sleep 1000",
            Self::Reads => "echo ready; cat; exit 4",
            Self::Quick => "echo ready; exit 5",
            Self::Floods => "echo ready; head -c 100000 /dev/zero | tr '\\0' x; exit 3",
            Self::Eats => "echo ready; tail /dev/zero; exit 9",
            Self::Leaves => "sleep 1000 >/dev/null 2>&1 & echo ready; exit 6",
            Self::Missing => return vec!["/no/such/program".to_owned()],
        };
        ["sh", "-c", script].map(str::to_owned).to_vec()
    }

    /// Returns whether it ends by itself.
    pub fn ends(self) -> bool {
        matches!(self, Self::Quick | Self::Floods | Self::Eats | Self::Leaves)
    }
}

/// A container, or an exec in it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// Which container.
    pub container: usize,
    /// Which exec.
    pub exec: Option<usize>,
}

impl Target {
    /// Returns the id of the exec, which is empty for the container.
    pub fn exec_id(self) -> String {
        self.exec.map(|exec| format!("e{exec}")).unwrap_or_default()
    }
}

impl fmt::Display for Target {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}", ["A", "B"].get(self.container).unwrap_or(&"?"))?;
        self.exec.map_or(Ok(()), |exec| write!(to, "/{exec}"))
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, to)
    }
}

/// Returns a container.
pub const fn init(container: usize) -> Target {
    Target { container, exec: None }
}

pub const fn exec(container: usize, exec: usize) -> Target {
    Target { container, exec: Some(exec) }
}

/// What the processes of the daemon are, as far as a sequence ends them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Worker,
    /// The front, and its worker with it.
    Front,
}

/// One request, or a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Creates the task of a container, or adds an exec. The reader of one that is `stalled` stops when it is ready.
    Create {
        target: Target,
        program: Program,
        terminal: bool,
        stalled: bool,
    },
    /// Asks for a task with so little time that the caller may give up, and then again with enough.
    CreateTwice {
        target: Target,
        program: Program,
        within_ms: u64,
    },
    Start {
        target: Target,
    },
    /// Sends a signal.
    Kill {
        target: Target,
        signal: u32,
        all: bool,
    },
    /// Closes stdin.
    CloseIo {
        target: Target,
    },
    Delete {
        target: Target,
    },
    /// Stops reading its output.
    Stall {
        target: Target,
    },
    /// Reads its output again.
    Read {
        target: Target,
    },
    /// Sets the size of its terminal.
    Resize {
        target: Target,
    },
    /// Freezes a container.
    Pause {
        container: usize,
    },
    /// Thaws it.
    Resume {
        container: usize,
    },
    /// Sets limits, one of [`LIMITS`].
    Update {
        container: usize,
        limits: usize,
    },
    /// Lists processes.
    Pids {
        container: usize,
    },
    /// Lists processes so often that a session's streams are used again; see [`STREAMS`].
    PidsOften {
        container: usize,
    },
    /// Adds an exec, of which the daemon cannot make a note: it has to refuse it and to forget it. runc is not asked.
    CreateUnnoted {
        target: Target,
        program: Program,
    },
    /// Reads figures.
    Metrics {
        container: usize,
    },
    /// The same container by CRI: create.
    CriCreate {
        container: usize,
        program: Program,
    },
    /// The same container by CRI: start.
    CriStart {
        container: usize,
    },
    /// Stop, with a grace period in seconds.
    CriStop {
        container: usize,
        grace: i64,
    },
    /// The same container by CRI: remove.
    CriRemove {
        container: usize,
    },
    /// Run a program to its end.
    CriExec {
        container: usize,
        program: Program,
    },
    /// Attach, and read nothing.
    CriAttach {
        container: usize,
    },
    /// Ends containerd, by SIGKILL if it is `killed`, and starts it.
    RestartContainerd {
        killed: bool,
    },
    /// Kills a part of the daemon.
    KillDaemon {
        part: Part,
    },
}

impl Step {
    pub fn name(self) -> String {
        let text = format!("{self:?}");
        text.split([' ', '{']).next().unwrap_or_default().to_owned()
    }

    /// Returns which process it is about.
    pub fn target(self) -> Option<Target> {
        match self {
            Self::Create { target, .. }
            | Self::CreateTwice { target, .. }
            | Self::CreateUnnoted { target, .. }
            | Self::Start { target }
            | Self::Kill { target, .. }
            | Self::CloseIo { target }
            | Self::Delete { target }
            | Self::Stall { target }
            | Self::Read { target }
            | Self::Resize { target } => Some(target),
            Self::Pause { container }
            | Self::Resume { container }
            | Self::Update { container, .. }
            | Self::Pids { container }
            | Self::PidsOften { container }
            | Self::Metrics { container }
            | Self::CriCreate { container, .. }
            | Self::CriStart { container }
            | Self::CriStop { container, .. }
            | Self::CriRemove { container }
            | Self::CriExec { container, .. }
            | Self::CriAttach { container } => Some(init(container)),
            Self::RestartContainerd { .. } | Self::KillDaemon { .. } => None,
        }
    }
}

/// The streams that the daemon's session with a guest has here.
pub const STREAMS: u32 = 64;

/// Limits as an update has them: some good, some no kernel takes.
pub const LIMITS: [&str; 8] = [
    r#"{"memory":{"limit":67108864}}"#,
    r#"{"cpu":{"shares":512}}"#,
    r#"{"cpu":{"quota":50000,"period":100000}}"#,
    r#"{"cpu":{"quota":1,"period":100000}}"#,
    r#"{"cpu":{"cpus":"99"}}"#,
    r#"{"cpu":{"cpus":"0"}}"#,
    r#"{"cpu":{"cpus":"none"}}"#,
    "{}",
];

/// Signals that are sent: some that end a process, some that do not, and numbers of none.
const SIGNALS: [u32; 9] = [1, 2, 9, 9, 10, 15, 28, 65, 100];

/// A sequence that is run first in every run.
#[derive(Debug, Clone)]
pub struct Fixed {
    /// What it is about.
    pub name: &'static str,
    /// What is asked.
    pub steps: Vec<Step>,
}

/// Sequences that once showed a difference.
pub fn corpus() -> Vec<Fixed> {
    let create = |target, program| Step::Create { target, program, terminal: false, stalled: false };
    let flooding = Step::Create { target: init(0), program: Program::Floods, terminal: false, stalled: true };
    let kill = |target, signal| Step::Kill { target, signal, all: false };
    let start = |target| Step::Start { target };
    let (a, b) = (init(0), init(1));
    let twice = |within_ms| Step::CreateTwice { target: a, program: Program::Traps, within_ms };
    let fixed = |name, steps| Fixed { name, steps };
    vec![
        fixed(
            "killed before its start",
            vec![
                create(b, Program::Deaf),
                start(b),
                create(a, Program::Traps),
                kill(a, 9),
                Step::Delete { target: a },
            ],
        ),
        fixed("ended before its start", vec![create(a, Program::Traps), kill(a, 15)]),
        fixed("deleted before its start", vec![create(a, Program::Traps), Step::Delete { target: a }]),
        fixed(
            "an exec deleted before its start",
            vec![
                create(a, Program::Traps),
                start(a),
                create(exec(0, 0), Program::Quick),
                Step::Delete { target: exec(0, 0) },
            ],
        ),
        fixed("nobody reads the output", vec![flooding, start(a), Step::Delete { target: a }]),
        fixed(
            "an end while containerd is down",
            vec![
                Step::CriCreate { container: 0, program: Program::Quick },
                Step::CriStart { container: 0 },
                Step::RestartContainerd { killed: true },
            ],
        ),
        fixed("nobody waits for the creation, 30 ms", vec![twice(30), start(a), kill(a, 15)]),
        fixed("nobody waits for the creation, 100 ms", vec![twice(100), start(a), kill(a, 15)]),
        fixed("nobody waits for the creation, 200 ms", vec![twice(200), start(a), kill(a, 15)]),
        fixed(
            "a child is killed for its memory, what ends later is not",
            vec![
                create(a, Program::Traps),
                start(a),
                create(exec(0, 0), Program::Eats),
                start(exec(0, 0)),
                create(exec(0, 1), Program::Quick),
                start(exec(0, 1)),
            ],
        ),
        fixed(
            "nothing more comes in, before its start",
            vec![create(a, Program::Reads), Step::CloseIo { target: a }, start(a)],
        ),
        fixed(
            "an exec in a frozen container",
            vec![
                create(a, Program::Traps),
                start(a),
                Step::Pause { container: 0 },
                create(exec(0, 0), Program::Quick),
                start(exec(0, 0)),
                Step::Resume { container: 0 },
            ],
        ),
        fixed(
            "an exec in a container that waits for its start",
            vec![
                create(a, Program::Traps),
                create(exec(0, 0), Program::Quick),
                start(exec(0, 0)),
                create(exec(0, 1), Program::Deaf),
                start(exec(0, 1)),
                start(a),
                kill(a, 15),
            ],
        ),
        fixed(
            "a container that waits for its start is deleted with its exec",
            vec![
                create(a, Program::Traps),
                create(exec(0, 0), Program::Deaf),
                start(exec(0, 0)),
                kill(a, 9),
                Step::Delete { target: exec(0, 0) },
                Step::Delete { target: a },
            ],
        ),
        fixed(
            "every stream of a session is used",
            vec![create(a, Program::Traps), start(a), Step::PidsOften { container: 0 }, kill(a, 15)],
        ),
        fixed(
            "no note can be made of an exec",
            vec![
                create(a, Program::Traps),
                start(a),
                Step::CreateUnnoted { target: exec(0, 0), program: Program::Deaf },
                create(exec(0, 0), Program::Quick),
                start(exec(0, 0)),
            ],
        ),
        fixed(
            "attached by CRI, and nobody reads",
            vec![
                Step::CriCreate { container: 0, program: Program::Floods },
                Step::CriAttach { container: 0 },
                Step::CriStart { container: 0 },
                Step::CriStop { container: 0, grace: 1 },
                Step::CriRemove { container: 0 },
            ],
        ),
    ]
}

/// As far as a generator has to know it, to make sequences that get somewhere.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Created,
    Started,
}

/// Returns a random sequence.
pub fn random(rng: &mut StdRng) -> Vec<Step> {
    let by_cri = rng.random_bool(0.3);
    let length = rng.random_range(3..=LONGEST);
    let mut stages = BTreeMap::new();
    let mut steps = Vec::new();
    while steps.len() < length {
        let step = match rng.random_range(0..100) {
            0..=2 => Step::RestartContainerd { killed: rng.random_bool(0.5) },
            3..=7 => Step::KillDaemon { part: if rng.random_bool(0.7) { Part::Worker } else { Part::Front } },
            8..=25 if by_cri => cri(rng, None),
            8..=25 => any(rng),
            _ if by_cri => cri(rng, Some(&stages)),
            _ => next(rng, &stages),
        };
        note(&mut stages, step);
        steps.push(step);
    }
    steps
}

fn note(stages: &mut BTreeMap<Target, Stage>, step: Step) {
    match step {
        Step::Create { target, .. } | Step::CreateTwice { target, .. } => {
            stages.entry(target).or_insert(Stage::Created);
        }
        Step::CriCreate { container, .. } => {
            stages.entry(init(container)).or_insert(Stage::Created);
        }
        Step::Start { target } => {
            stages.entry(target).and_modify(|stage| *stage = Stage::Started);
        }
        Step::CriStart { container } => {
            stages.entry(init(container)).and_modify(|stage| *stage = Stage::Started);
        }
        Step::Delete { target } => stages.retain(|known, _| {
            *known != target && !(target.exec.is_none() && known.container == target.container)
        }),
        Step::CriRemove { container } => stages.retain(|known, _| known.container != container),
        _ => {}
    }
}

fn program(rng: &mut StdRng) -> Program {
    *Program::ALL.choose(rng).unwrap_or(&Program::Deaf)
}

fn container(rng: &mut StdRng) -> usize {
    if rng.random_bool(0.7) { 0 } else { rng.random_range(0..CONTAINERS) }
}

fn process(rng: &mut StdRng) -> Target {
    let container = container(rng);
    match rng.random_bool(0.4) {
        true => exec(container, rng.random_range(0..EXECS)),
        false => init(container),
    }
}

fn creation(rng: &mut StdRng, target: Target) -> Step {
    let program = program(rng);
    if target.exec.is_none() && rng.random_bool(0.08) {
        return Step::CreateTwice { target, program, within_ms: rng.random_range(1..200) };
    }
    // A terminal echoes what nobody has written, and ends by a key: plain streams say more.
    let terminal = program != Program::Floods && rng.random_bool(0.1);
    Step::Create { target, program, terminal, stalled: rng.random_bool(0.15) }
}

fn kill(rng: &mut StdRng, target: Target) -> Step {
    let signal = *SIGNALS.choose(rng).unwrap_or(&9);
    // Since runc 1.2, a signal to all goes to the init alone, unless it kills; here it goes to all.
    Step::Kill { target, signal, all: signal == 9 && target.exec.is_none() && rng.random_bool(0.2) }
}

/// A step that makes sense where the sequence is.
fn next(rng: &mut StdRng, stages: &BTreeMap<Target, Stage>) -> Step {
    let target = process(rng);
    let target = if stages.contains_key(&init(target.container)) { target } else { init(target.container) };
    let container = target.container;
    match stages.get(&target) {
        None => creation(rng, target),
        Some(Stage::Created) => match rng.random_range(0..10) {
            0..=5 => Step::Start { target },
            6 => kill(rng, target),
            7 => Step::CloseIo { target },
            8 => Step::Delete { target },
            _ => Step::Pause { container },
        },
        Some(Stage::Started) => match rng.random_range(0..16) {
            0..=4 => kill(rng, target),
            5 | 6 => Step::CloseIo { target },
            7..=9 => Step::Delete { target },
            10 => Step::Stall { target },
            11 => Step::Read { target },
            12 => Step::Pause { container },
            13 => Step::Resume { container },
            14 => Step::Update { container, limits: rng.random_range(0..LIMITS.len()) },
            _ => {
                let target = exec(container, rng.random_range(0..EXECS));
                creation(rng, target)
            }
        },
    }
}

/// Any step at all.
fn any(rng: &mut StdRng) -> Step {
    let target = process(rng);
    let container = target.container;
    match rng.random_range(0..13) {
        0 => creation(rng, target),
        1 => Step::Start { target },
        2 | 3 => kill(rng, target),
        4 => Step::CloseIo { target },
        5 | 6 => Step::Delete { target },
        7 => Step::Pause { container },
        8 => Step::Resume { container },
        9 => Step::Update { container, limits: rng.random_range(0..LIMITS.len()) },
        10 => Step::Pids { container },
        11 => Step::Metrics { container },
        _ => Step::Resize { target },
    }
}

/// A step of CRI's, which makes sense if it is known where the sequence is.
fn cri(rng: &mut StdRng, stages: Option<&BTreeMap<Target, Stage>>) -> Step {
    let container = container(rng);
    let create = |rng: &mut StdRng| Step::CriCreate { container, program: program(rng) };
    let choice = match stages.map(|stages| stages.get(&init(container))) {
        Some(None) => 0,
        Some(Some(Stage::Created)) => *[1, 1, 1, 2, 3, 5].choose(rng).unwrap_or(&1),
        Some(Some(Stage::Started)) => rng.random_range(2..6),
        None => rng.random_range(0..6),
    };
    match choice {
        0 => create(rng),
        1 => Step::CriStart { container },
        2 => Step::CriStop { container, grace: *[0, 1, 2].choose(rng).unwrap_or(&0) },
        3 => Step::CriRemove { container },
        4 => Step::CriExec {
            container,
            program: *[Program::Quick, Program::Missing, Program::Leaves]
                .choose(rng)
                .unwrap_or(&Program::Quick),
        },
        _ => Step::CriAttach { container },
    }
}

/// Removes parts for as long as `fails` says that what is left still fails; asks it at most `most` times.
pub async fn shrink<T, F>(mut parts: Vec<T>, mut most: usize, mut fails: impl FnMut(Vec<T>) -> F) -> Vec<T>
where
    T: Clone,
    F: Future<Output = bool>,
{
    let mut size = parts.len().div_ceil(2);
    while size > 0 {
        let mut at = 0;
        while at < parts.len() {
            if most == 0 {
                return parts;
            }
            let mut fewer = parts.clone();
            fewer.drain(at..(at + size).min(parts.len()));
            most -= 1;
            if !fewer.is_empty() && fails(fewer.clone()).await {
                parts = fewer;
            } else {
                at += size;
            }
        }
        size /= 2;
    }
    parts
}
