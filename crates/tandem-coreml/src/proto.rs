//! The messages of the format, generated from `proto/`.

#![allow(missing_docs, clippy::all, reason = "generated")]

pub mod mil {
    include!(concat!(env!("OUT_DIR"), "/coreml.mil.rs"));
}

pub mod model {
    include!(concat!(env!("OUT_DIR"), "/coreml.model.rs"));
}
