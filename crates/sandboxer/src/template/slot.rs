//! What is known of the template for one size.

use std::{mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Template, TemplateKey, build::BuildError, key::InputDigest};

/// How long after a failure the next attempt is made by itself.
const RETRY: Duration = Duration::from_secs(60);
/// How often it is written down that a template is used.
const NOTED: Duration = Duration::from_secs(10);

/// Why there is no template at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Missing {
    /// Templates are turned off.
    Off,
    /// It is being made, or read.
    Preparing,
    /// What it was made of has changed; another is being made.
    Stale,
    /// What is on disk is not what was written; another is being made.
    Damaged,
    /// The VMM would not restore it; another is being made.
    Refused,
    /// Those that are in use leave no room for it.
    NoRoom,
    /// It could not be made; the log says why.
    NotMade,
}

impl Missing {
    /// Returns the reason as it is counted.
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

/// What is known of one size's template.
#[derive(Debug, Default)]
pub struct Slot {
    pub state: State,
    /// What it took on disk when it was last there, bytes.
    pub bytes: u64,
    /// In what the last attempt failed, which was told.
    told: Option<mem::Discriminant<BuildError>>,
}

/// Whether it is there.
#[derive(Debug, Default)]
pub enum State {
    /// Nobody has asked for it.
    #[default]
    Unasked,
    /// Somebody sees to it; meanwhile it is missing for this reason.
    Preparing(Missing),
    /// It is.
    Ready(Ready),
    /// It could not be had, then.
    Failed(Missing, Instant),
}

/// A template in use.
#[derive(Debug)]
pub struct Ready {
    pub template: Arc<Template>,
    /// Of what it was made.
    pub survey: Arc<InputDigest>,
    /// By this daemon: made again, it would be the same.
    made: bool,
    pub used: Instant,
    /// When that was last written down.
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

    /// Somebody needs another template than what is there. `Ok`: it is to be prepared now, and missing meanwhile;
    /// `Err`: it is missing, and being seen to.
    pub fn ask(&mut self) -> Result<Missing, Missing> {
        let missing = match &self.state {
            State::Preparing(why) => return Err(*why),
            State::Failed(why, at) if at.elapsed() < RETRY => return Err(*why),
            State::Failed(why, _) => *why,
            State::Ready(_) => Missing::Stale,
            State::Unasked => Missing::Preparing,
        };
        self.state = State::Preparing(missing);
        Ok(missing)
    }

    /// It is there from now on, `made` or found.
    pub fn settle(&mut self, template: Arc<Template>, survey: Arc<InputDigest>, made: bool) {
        let now = Instant::now();
        self.state = State::Ready(Ready { template, survey, made, used: now, noted: now });
        self.told = None;
    }

    /// Returns the template of this name could not be restored. Returns whether another is to be made.
    pub fn refuse(&mut self, key: &TemplateKey) -> bool {
        let refused = self.ready().is_some_and(|ready| ready.template.key == *key && !ready.made);
        if refused {
            self.state = State::Preparing(Missing::Refused);
        }
        refused
    }

    /// Returns what is on disk was refused.
    pub fn is_refused(&self) -> bool {
        matches!(self.state, State::Preparing(Missing::Refused))
    }

    /// It could not be had. Returns whether that is news.
    pub fn fail(&mut self, error: &BuildError) -> bool {
        let why = match error {
            BuildError::NoRoom { .. } => Missing::NoRoom,
            _ => Missing::NotMade,
        };
        self.state = State::Failed(why, Instant::now());
        let kind = mem::discriminant(error);
        self.told.replace(kind) != Some(kind)
    }
}

impl Ready {
    /// It is used. Returns whether that is to be written down.
    pub fn touch(&mut self) -> bool {
        self.used = Instant::now();
        let due = self.noted.elapsed() >= NOTED;
        if due {
            self.noted = self.used;
        }
        due
    }
}
