//! Tells the kinds of models apart before anything of them is read.

use std::path::Path;

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use crate::error::CoremlError;

const SPECIFICATION: u32 = 1;
const PROGRAM: u32 = 502;

/// What stands in each field of a model that says its kind.
fn kind(field: u32) -> Option<&'static str> {
    Some(match field {
        200..=202 => "a pipeline",
        300..=302 | 304 | 400..=402 | 404 => "a classical model (regression, trees, support vectors)",
        303 | 403 | 500 => "a NeuralNetwork",
        501 => "a recommender",
        PROGRAM => "an ML Program",
        555 => "a custom model",
        556 => "a link to another model",
        560 | 600..=610 | 900 => "a feature transformer",
        2000..=2006 => "one of Apple's own models",
        3000 => "an encrypted model",
        _ => return None,
    })
}

/// That `bytes` are those of an ML Program.
pub(super) fn check(package: &Path, file: &Path, bytes: &[u8]) -> Result<(), CoremlError> {
    let wrong = |what: String| CoremlError::malformed(file, what);
    let mut rest = bytes;
    let (mut found, mut version) = (None, 0);
    while !rest.is_empty() {
        let (field, wire) = decode_key(&mut rest).map_err(|error| wrong(error.to_string()))?;
        let at = bytes.len() - rest.len();
        if field == SPECIFICATION && wire == WireType::Varint {
            version = decode_varint(&mut rest).map_err(|error| wrong(error.to_string()))?;
            continue;
        }
        if kind(field).is_some() {
            found = Some(field);
        }
        skip_field(wire, field, &mut rest, DecodeContext::default())
            .map_err(|error| wrong(format!("field {field} at byte {at}: {error}")))?;
    }
    match found {
        Some(PROGRAM) => Ok(()),
        Some(field) => {
            let what = format!("it is {} (specification {version})", kind(field).unwrap_or_default());
            let hint =
                "convert it again with minimum_deployment_target iOS 15 or newer, which gives an ML Program";
            Err(CoremlError::not_a_package(package, what, hint))
        }
        None => Err(wrong(format!("{} bytes that hold no model", bytes.len()))),
    }
}
