//! `tandem list`.

use std::io::Write;
use std::process::ExitCode;

use serde::Serialize;
use tandem_store::{Entry, Format, Source, Store};

use crate::cli::ListArgs;
use crate::measure::size;

/// A model as `--json` shows it.
#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    bytes: u64,
    format: &'static str,
    source: &'static str,
    path: String,
}

impl<'a> Row<'a> {
    fn new(entry: &'a Entry) -> Self {
        let format = match entry.format {
            Format::Folder => "folder",
            Format::Gguf => "gguf",
        };
        let source = match entry.source {
            Source::Local => "local",
            Source::Package => "package",
            Source::Hub => "hub",
        };
        Self { name: &entry.name, bytes: entry.bytes, format, source, path: entry.path.display().to_string() }
    }
}

pub fn run(args: &ListArgs) -> anyhow::Result<ExitCode> {
    let store = Store::open(None)?;
    let entries = store.list();
    let rows: Vec<Row> = entries.iter().map(Row::new).collect();
    let mut out = std::io::stdout();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&rows)?)?;
    } else if rows.is_empty() {
        let names: Vec<&str> = store.aliases().iter().map(|a| a.name).collect();
        eprintln!(
            "there are no models on this machine yet\nhint: tandem pull NAME, such as {}",
            names.join(" or ")
        );
    } else {
        let width = rows.iter().map(|r| r.name.len()).max().unwrap_or(0).max(4);
        writeln!(out, "{:width$}  {:>8}  {:6}  {:7}  PATH", "NAME", "SIZE", "FORMAT", "SOURCE")?;
        for Row { name, bytes, format, source, path } in &rows {
            writeln!(out, "{name:width$}  {:>8}  {format:6}  {source:7}  {path}", size(*bytes))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
