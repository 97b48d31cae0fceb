//! How fast pods start and what they cost: measured over CRI, for any runtime handler.

pub mod options;
pub mod runtime;
