//! The device that MLX computes on, and the limits it is given.

use tandem_engine::EngineError;

use crate::MlxDevice;
use crate::array::{Array, Dtype, Result, evaluate, failed};
use crate::ffi::bridge;
use crate::kernels;

/// What MLX says of the device it computes on.
///
/// # Errors
/// [`EngineError::Device`] if the library is of another version than the headers this was built with (its C++ functions
/// are not stable between releases), or MLX fails.
pub fn device() -> Result<MlxDevice> {
    let (header, library) = (bridge::header_version(), bridge::library_version());
    if !same_release(&header, &library) {
        return Err(EngineError::Device(format!(
            "this program was built with MLX {header} and found MLX {library}. hint: install MLX {header} (python3 -m \
             pip install mlx=={header}) or build Tandem again"
        )));
    }
    let gpu = bridge::choose_device().map_err(|error| failed(&error))?;
    let facts = bridge::device_facts().map_err(|error| failed(&error))?;
    let text = |name: &str| {
        let fact = facts.iter().find(|fact| fact.name == name)?;
        Some(fact.text.clone()).filter(|text| !text.is_empty())
    };
    let number = |name: &str| facts.iter().find(|fact| fact.name == name).map(|fact| fact.number);
    let total = number("memory_size").or_else(|| number("total_memory")).filter(|bytes| *bytes > 0);
    let architecture = text("architecture");
    Ok(MlxDevice {
        version: library,
        gpu,
        own_kernels: kernels::are_for(architecture.as_deref()),
        architecture,
        name: text("device_name").or_else(|| text("architecture")),
        memory: total,
        usable: number("free_memory").or_else(|| number("max_recommended_working_set_size")).or(total),
    })
}

/// # Errors
/// [`EngineError::Device`] if MLX cannot compute: one built for CUDA does not without a GPU.
pub(crate) fn computes() -> Result<()> {
    let one = Array::from_u32(&[1])?.as_type(Dtype::F32);
    one.and_then(|one| evaluate([&one])).map_err(|error| match error {
        EngineError::Device(what) => EngineError::Device(format!(
            "{what}. hint: an MLX for CUDA needs a GPU that it can use (does nvidia-smi see one?); or take --engine cpu"
        )),
        other => other,
    })
}

/// The header knows three numbers; a development build of the library has a suffix.
fn same_release(header: &str, library: &str) -> bool {
    library == header || library.strip_prefix(header).is_some_and(|rest| rest.starts_with(['.', '+', '-']))
}

/// Tells MLX how much it may take and keep. Wiring is known to Metal alone.
pub(crate) fn limit(budget: u64, wired: u64, cache: u64) -> Result<()> {
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    bridge::set_memory_limit(size(budget)).map_err(|error| failed(&error))?;
    bridge::set_cache_limit(size(cache)).map_err(|error| failed(&error))?;
    if cfg!(target_os = "macos") {
        bridge::set_wired_limit(size(wired)).map_err(|error| failed(&error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_release_is_not_taken_for_the_same() {
        assert!(same_release("0.32.4", "0.32.4"));
        assert!(same_release("0.32.4", "0.32.4.dev20260101+abc"));
        assert!(!same_release("0.32.4", "0.32.41"));
        assert!(!same_release("0.32.4", "0.32.3"));
    }
}
