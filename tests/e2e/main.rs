//! Each test is a promise, shown on a real guest through the API.

mod bad_input;
mod broken_callers;
mod cli;
mod commands;
mod crashes;
mod files;
mod full_host;
mod guest;
mod limits;
mod sandboxes;
