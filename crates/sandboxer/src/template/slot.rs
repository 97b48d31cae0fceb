//! The state of the template of one size.

use std::{mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Template, TemplateKey, build::BuildError, key::InputDigest};

/// How long after a failure the next attempt starts by itself.
const RETRY: Duration = Duration::from_secs(60);
/// How often the use of a template is written to disk.
const NOTED: Duration = Duration::from_secs(10);

/// Why there is no template now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Missing {
    /// Templates are turned off.
    Off,
    /// It is being built or loaded.
    Preparing,
    /// Its inputs have changed; a new one is being built.
    Stale,
    /// Its files are damaged; a new one is being built.
    Damaged,
    /// The VMM refused to restore it; a new one is being built.
    Refused,
    /// Templates in use leave no space for it.
    NoRoom,
    /// It could not be built; the log says why.
    NotMade,
}

impl Missing {
    /// Returns the reason's label in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Missing::Off => "off",
            Missing::Preparing => "preparing",
            Missing::Stale => "stale",
            Missing::Damaged => "damaged",
            Missing::Refused => "refused",
            Missing::NoRoom => "no-room",
            Missing::NotMade => "not-made",
        }
    }
}

/// The state of one size's template.
#[derive(Debug, Default)]
pub struct Slot {
    pub state: State,
    /// Its last size on disk, bytes.
    pub bytes: u64,
    /// The kind of the last failure, which was logged.
    logged: Option<mem::Discriminant<BuildError>>,
}

/// Whether the template is there.
#[derive(Debug, Default)]
pub enum State {
    /// Not requested yet.
    #[default]
    NotRequested,
    /// A task prepares it; meanwhile it is missing for this reason.
    Preparing(Missing),
    /// It is there.
    Ready(Ready),
    /// It failed, at this time.
    Failed(Missing, Instant),
}

/// A template in use.
#[derive(Debug)]
pub struct Ready {
    pub template: Arc<Template>,
    /// Its inputs.
    pub survey: Arc<InputDigest>,
    /// Built by this daemon: another build would give the same.
    made: bool,
    pub used: Instant,
    /// When its use was last written to disk.
    noted: Instant,
}

impl Slot {
    /// Returns the template, if it is there.
    pub fn ready(&self) -> Option<&Ready> {
        match &self.state {
            State::Ready(ready) => Some(ready),
            _ => None,
        }
    }

    /// Requests a template other than the one that is there. `Ok`: the caller must prepare it, and it is missing
    /// meanwhile; `Err`: it is missing, and is being prepared.
    pub fn request(&mut self) -> Result<Missing, Missing> {
        let missing = match &self.state {
            State::Preparing(why) => return Err(*why),
            State::Failed(why, at) if at.elapsed() < RETRY => return Err(*why),
            State::Failed(why, _) => *why,
            State::Ready(_) => Missing::Stale,
            State::NotRequested => Missing::Preparing,
        };
        self.state = State::Preparing(missing);
        Ok(missing)
    }

    /// Sets the template, `made` by this daemon or found on disk.
    pub fn settle(&mut self, template: Arc<Template>, survey: Arc<InputDigest>, made: bool) {
        let now = Instant::now();
        self.state = State::Ready(Ready { template, survey, made, used: now, noted: now });
        self.logged = None;
    }

    /// Drops the template of this name, which could not be restored. Returns whether a new one is to be built.
    pub fn refuse(&mut self, key: &TemplateKey) -> bool {
        let refused = self.ready().is_some_and(|ready| ready.template.key == *key && !ready.made);
        if refused {
            self.state = State::Preparing(Missing::Refused);
        }
        refused
    }

    /// Returns whether the VMM refused what is on disk.
    pub fn is_refused(&self) -> bool {
        matches!(self.state, State::Preparing(Missing::Refused))
    }

    /// Notes a failure. Returns whether it is to be logged.
    pub fn fail(&mut self, error: &BuildError) -> bool {
        let why = match error {
            BuildError::NoRoom { .. } => Missing::NoRoom,
            _ => Missing::NotMade,
        };
        self.state = State::Failed(why, Instant::now());
        let kind = mem::discriminant(error);
        self.logged.replace(kind) != Some(kind)
    }
}

impl Ready {
    /// Notes a use. Returns whether it is to be written to disk.
    pub fn touch(&mut self) -> bool {
        self.used = Instant::now();
        let due = self.noted.elapsed() >= NOTED;
        if due {
            self.noted = self.used;
        }
        due
    }
}
