//! A server on a loopback port, asked by an HTTP client that is not ours. Most tests run on the fake engine, whose tokens
//! are given by a definition, so that every answer is compared with what it must be.

#![allow(clippy::unwrap_used, reason = "tests")]

mod answers;
mod bad_input;
mod errors;
mod faults;
mod harness;
mod operation;
mod page;
mod routes;
mod tools;
