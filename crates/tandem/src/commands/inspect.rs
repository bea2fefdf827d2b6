//! `tandem inspect`: what a Core ML package holds.

use std::io::Write;
use std::process::ExitCode;

use serde::Serialize;
use tandem_coreml::inspect::{FeatureInspection, FunctionInspection, Inspection, inspect};

use crate::cli::InspectArgs;
use crate::measure::size;
use crate::package::{open, plain};

/// As `--json` shows it.
#[derive(Serialize)]
struct Report {
    package: String,
    #[serde(flatten)]
    inspection: Inspection,
}

pub fn run(args: &InspectArgs) -> anyhow::Result<ExitCode> {
    let inspection = inspect(&open(&args.package)?)?;
    let mut out = std::io::stdout().lock();
    let package = args.package.display().to_string();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&Report { package, inspection })?)?;
    } else {
        print(&mut out, &package, &inspection)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(out: &mut impl Write, package: &str, inspection: &Inspection) -> std::io::Result<()> {
    let Inspection {
        specification,
        systems,
        default_function,
        functions,
        weights,
        files,
        bytes,
        metadata,
        ..
    } = inspection;
    writeln!(out, "{package}: ML Program, {}", size(*bytes))?;
    writeln!(out, "specification {specification} ({} or newer)", systems.unwrap_or("systems unknown"))?;
    for function in functions {
        let default =
            if functions.len() > 1 && function.name == *default_function { ", default" } else { "" };
        writeln!(out, "\nfunction {} ({}{default})", plain(&function.name), plain(&function.opset))?;
        print_function(out, function)?;
    }
    writeln!(out, "\nweights")?;
    for row in weights {
        writeln!(
            out,
            "  {:10} {:>10}  {} elements in {} tensors",
            row.dtype,
            size(row.bytes),
            row.elements,
            row.tensors
        )?;
    }
    writeln!(out, "\nfiles")?;
    for file in files {
        writeln!(out, "  {:>10}  {}", size(file.bytes), plain(&file.path))?;
    }
    if !metadata.is_empty() {
        writeln!(out, "\nmetadata")?;
    }
    for (key, text) in metadata {
        writeln!(out, "  {}: {}", plain(key), plain(text))?;
    }
    Ok(())
}

fn print_function(out: &mut impl Write, function: &FunctionInspection) -> std::io::Result<()> {
    let groups = [("input", &function.inputs), ("output", &function.outputs), ("state", &function.states)];
    for (what, features) in groups {
        for FeatureInspection { name, ty, shapes } in features {
            let shapes: Vec<String> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
            let also =
                if shapes.is_empty() { String::new() } else { format!(", one of {}", shapes.join(" ")) };
            writeln!(out, "  {what:6} {}: {ty}{also}", plain(name))?;
        }
    }
    let mut operators: Vec<_> = function.operators.iter().collect();
    operators.sort_by_key(|(kind, count)| (std::cmp::Reverse(**count), kind.as_str()));
    for (kind, count) in operators {
        writeln!(out, "  {count:>6} {}", plain(kind))?;
    }
    Ok(())
}
