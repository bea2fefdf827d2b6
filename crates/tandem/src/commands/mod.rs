//! What each command does.

pub mod audit;
pub mod bench;
pub mod chat;
pub mod completions;
pub mod doctor;
pub mod export;
pub mod inspect;
pub mod list;
pub mod pull;
pub mod rm;
pub mod run;
pub mod serve;
