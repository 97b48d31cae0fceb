//! Verdicts on results, by rules that are data: see [`sheet`].
//!
//! | module | what it holds |
//! |---|---|
//! | [`sheet`] | the rules: built-in ones are in `data/sheets` |
//! | [`figures`] | the figures of a result that rules judge |
//! | [`levels`] | scores by percentage of a baseline |
//! | [`gate`] | ratios within a tolerance |
//! | [`sla`] | highest rates under bounds of latency |
//! | [`published`] | the published figures from which scores by percentage are taken |

pub mod figures;
pub mod gate;
pub mod levels;
pub mod published;
pub mod sheet;
pub mod sla;
