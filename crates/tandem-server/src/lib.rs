//! An HTTP server that speaks OpenAI's API.
//!
//! A request's way: [`request`] reads the body with a pure function that refuses by name whatever it would not honour;
//! the model's template and tokenizer make a prompt of it off the async threads; the coordinator gives one runtime
//! request for each choice to an engine; and `answer` merges their streams, which are polled and need no thread. A client that goes away
//! drops the future or the body that holds those streams, and dropping a stream is the cancel: there is nothing else to
//! forget.
//!
//! An error that is known before the first token is an HTTP status with OpenAI's error object. After that it is an
//! `error` event, and the stream ends without `[DONE]`.

mod answer;
mod app;
mod calls;
mod error;
mod fields;
mod guard;
mod metrics;
mod model;
mod operation;
mod page;
mod patience;
mod reply;
pub mod request;
mod server;
mod stream;

pub use app::{App, Options};
pub use error::ApiError;
pub use model::Model;
pub use server::{run, serve};
