//! Core ML's plan, through `MLComputePlan`. Type-checked on other systems; what it does, only a Mac shows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};

use block2::RcBlock;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::{AnyClass, NSObjectProtocol, ProtocolObject};
use objc2::{ClassType, sel};
use objc2_core_ml::{
    MLComputeDeviceProtocol, MLComputePlan, MLComputeUnits, MLGPUComputeDevice, MLModel,
    MLModelConfiguration, MLModelStructureProgramBlock, MLNeuralEngineComputeDevice,
};
use objc2_foundation::{NSError, NSString, NSURL};

use super::{Planned, Plans, Processor};

type PlanOf = BTreeMap<String, Planned>;

/// The plans of `functions`, with every processor allowed.
pub(super) fn plans(package: &Path, functions: &[&str]) -> Result<Plans, String> {
    if AnyClass::get(c"MLComputePlan").is_none() {
        return Err("Core ML tells its plans from macOS 14.4 on".into());
    }
    autoreleasepool(|_| {
        let compiled = Compiled::new(package)?;
        let plan = |name: &&str| {
            // One function is the default one, and naming it takes macOS 15.
            let named = (functions.len() > 1).then_some(*name);
            Ok(((*name).to_owned(), compiled.plan(name, named)?))
        };
        let functions = functions.iter().map(plan).collect::<Result<_, String>>()?;
        Ok(Plans { machine: machine(), functions })
    })
}

/// A compiled package in a temporary folder, which goes with it.
struct Compiled(PathBuf);

impl Drop for Compiled {
    fn drop(&mut self) {
        // What stays is in the system's temporary folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Compiled {
    fn new(package: &Path) -> Result<Self, String> {
        let url = url(package)?;
        let (sender, receiver) = channel();
        let handler = RcBlock::new(move |compiled: *mut NSURL, error: *mut NSError| {
            // SAFETY: Core ML gives valid objects or null, alive for the call.
            let compiled = unsafe { compiled.as_ref() };
            let path = compiled.and_then(NSURL::path).map(|path| PathBuf::from(path.to_string()));
            answer(&sender, path.ok_or_else(|| words(error)));
        });
        // SAFETY: the block lives until Core ML has called it, since it keeps a copy.
        unsafe { MLModel::compileModelAtURL_completionHandler(&url, &handler) };
        drop(handler);
        wait(&receiver).map(Self)
    }

    /// The plan of the function `name`, which the configuration asks for by `named` where there are several.
    fn plan(&self, name: &str, named: Option<&str>) -> Result<PlanOf, String> {
        let url = url(&self.0)?;
        // SAFETY: a new object, and a setter of a plain value.
        let configuration = unsafe {
            let configuration = MLModelConfiguration::new();
            configuration.setComputeUnits(MLComputeUnits::All);
            configuration
        };
        if let Some(named) = named {
            if !configuration.respondsToSelector(sel!(setFunctionName:)) {
                return Err("Core ML plans packages of several functions from macOS 15 on".into());
            }
            // SAFETY: the selector is there, and copies its argument.
            unsafe { configuration.setFunctionName(Some(&NSString::from_str(named))) };
        }
        let (sender, receiver) = channel();
        let function = name.to_owned();
        let handler = RcBlock::new(move |plan: *mut MLComputePlan, error: *mut NSError| {
            // SAFETY: Core ML gives valid objects or null, alive for the call; nothing of them leaves it.
            let plan = unsafe { plan.as_ref() };
            let read = plan.ok_or_else(|| words(error)).and_then(|plan| read(plan, &function));
            answer(&sender, read);
        });
        // SAFETY: the block lives until Core ML has called it, since it keeps a copy.
        unsafe {
            MLComputePlan::loadContentsOfURL_configuration_completionHandler(&url, &configuration, &handler);
        }
        drop(handler);
        wait(&receiver)
    }
}

fn read(plan: &MLComputePlan, function: &str) -> Result<PlanOf, String> {
    // SAFETY: getters of immutable objects.
    let functions = unsafe { plan.modelStructure().program().map(|program| program.functions()) };
    let functions = functions.ok_or("Core ML sees no ML Program in it")?;
    let found = functions.objectForKey(&NSString::from_str(function));
    let found = found.ok_or_else(|| format!("Core ML's plan has no function {function}"))?;
    let mut planned = PlanOf::new();
    // SAFETY: a getter of an immutable object.
    let block = unsafe { found.block() };
    read_block(plan, &block, &mut planned);
    Ok(planned)
}

fn read_block(plan: &MLComputePlan, block: &MLModelStructureProgramBlock, planned: &mut PlanOf) {
    // SAFETY: getters of immutable objects.
    unsafe {
        for operation in block.operations() {
            for inner in operation.blocks() {
                read_block(plan, &inner, planned);
            }
            // Constants have none.
            let Some(usage) = plan.computeDeviceUsageForMLProgramOperation(&operation) else { continue };
            let plan = Planned {
                on: processor(&usage.preferredComputeDevice()),
                supported: usage.supportedComputeDevices().iter().map(|device| processor(&device)).collect(),
                cost: plan.estimatedCostOfMLProgramOperation(&operation).map(|cost| cost.weight()),
            };
            for output in operation.outputs() {
                planned.insert(output.name().to_string(), plan.clone());
            }
        }
    }
}

fn processor(device: &Retained<ProtocolObject<dyn MLComputeDeviceProtocol>>) -> Processor {
    if device.isKindOfClass(MLNeuralEngineComputeDevice::class()) {
        Processor::Ane
    } else if device.isKindOfClass(MLGPUComputeDevice::class()) {
        Processor::Gpu
    } else {
        Processor::Cpu
    }
}

fn url(path: &Path) -> Result<Retained<NSURL>, String> {
    let path = path.to_str().ok_or("the path is not UTF-8")?;
    Ok(NSURL::fileURLWithPath(&NSString::from_str(path)))
}

fn words(error: *mut NSError) -> String {
    // SAFETY: Core ML gives a valid object or null, alive for the call.
    let error = unsafe { error.as_ref() };
    error.map_or_else(|| "Core ML gives no reason".into(), |error| error.localizedDescription().to_string())
}

/// Nobody waits any more where this fails.
fn answer<T>(sender: &Sender<Result<T, String>>, result: Result<T, String>) {
    let _ = sender.send(result);
}

fn wait<T>(receiver: &Receiver<Result<T, String>>) -> Result<T, String> {
    receiver.recv().unwrap_or_else(|_| Err("Core ML gave no answer".into()))
}

/// `Apple M3 Pro`.
fn machine() -> String {
    let mut text = [0u8; 128];
    let mut length = text.len();
    // SAFETY: the name ends with a zero, and no more than `length` bytes are written.
    let status = unsafe {
        libc::sysctlbyname(
            c"machdep.cpu.brand_string".as_ptr(),
            text.as_mut_ptr().cast(),
            &raw mut length,
            std::ptr::null_mut(),
            0,
        )
    };
    let known = if status == 0 { &text[..length.min(text.len())] } else { &[] };
    String::from_utf8_lossy(known).trim_end_matches('\0').to_owned()
}
