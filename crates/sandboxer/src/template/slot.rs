//! The state of the template of one size.

use std::{mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Template, TemplateKey, build::BuildError, key::InputDigest};

/// Time after a failure before the next attempt starts by itself.
const RETRY: Duration = Duration::from_secs(60);
/// Minimum interval between two writes of a template's last use to disk.
const NOTED: Duration = Duration::from_secs(10);

/// A reason why there is no template now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Missing {
    /// Templates are turned off.
    Off,
    /// The template is being built or loaded.
    Preparing,
    /// The template's inputs have changed; a new one is being built.
    Stale,
    /// The template's files are damaged; a new one is being built.
    Damaged,
    /// The VMM refused to restore the template; a new one is being built.
    Refused,
    /// Templates in use leave no space for the template.
    NoRoom,
    /// The template could not be built; the log contains the reason.
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
    /// The template's last size on disk, bytes.
    pub bytes: u64,
    /// The kind of the last failure, which was logged.
    logged: Option<mem::Discriminant<BuildError>>,
}

/// The availability of a template.
#[derive(Debug, Default)]
pub enum State {
    /// The template has not been requested yet.
    #[default]
    NotRequested,
    /// A task prepares the template; meanwhile it is missing for this reason.
    Preparing(Missing),
    /// The template is in memory.
    Ready(Ready),
    /// The preparation failed, at this time.
    Failed(Missing, Instant),
}

/// A template in use.
#[derive(Debug)]
pub struct Ready {
    pub template: Arc<Template>,
    /// The template's inputs.
    pub survey: Arc<InputDigest>,
    /// Whether this daemon built the template: another build would give the same.
    made: bool,
    pub used: Instant,
    /// Time at which the template's use was last written to disk.
    noted: Instant,
}

impl Slot {
    /// Returns the template, if it is ready.
    pub fn ready(&self) -> Option<&Ready> {
        match &self.state {
            State::Ready(ready) => Some(ready),
            _ => None,
        }
    }

    /// Starts the preparation of a new template. `Ok`: the caller must prepare it. `Err`: another caller is preparing
    /// it, or the last attempt failed just now. Either way, no template is available, for the returned reason.
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

    /// Drops the template of this name, which could not be restored. Returns whether a new one must be built.
    pub fn refuse(&mut self, key: &TemplateKey) -> bool {
        let refused = self.ready().is_some_and(|ready| ready.template.key == *key && !ready.made);
        if refused {
            self.state = State::Preparing(Missing::Refused);
        }
        refused
    }

    /// Returns whether the VMM refused the template on disk.
    pub fn is_refused(&self) -> bool {
        matches!(self.state, State::Preparing(Missing::Refused))
    }

    /// Records a failure. Returns whether the caller must log it.
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
    /// Records a use. Returns whether the caller must write it to disk.
    pub fn touch(&mut self) -> bool {
        self.used = Instant::now();
        let due = self.noted.elapsed() >= NOTED;
        if due {
            self.noted = self.used;
        }
        due
    }
}
