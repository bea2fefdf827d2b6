//! Another process, watched: when its first output came, and how much memory it took.

use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::measure::peak_memory_of;

/// Between two looks at the process. A look costs some microseconds.
const LOOK: Duration = Duration::from_millis(5);

/// A process that takes longer than this for one test hangs.
const PATIENCE: Duration = Duration::from_secs(1800);

/// How a process went that ended well.
pub struct Ran {
    pub stdout: String,
    pub stderr: String,
    /// From before it was started until `has_come` said that its output has what is waited for.
    pub first: Option<Duration>,
    /// Most bytes it has held in memory.
    pub peak_memory: Option<u64>,
}

/// Runs it to its end.
pub fn run(command: &mut Command, has_come: fn(&[u8]) -> bool) -> anyhow::Result<Ran> {
    let name = command.get_program().to_string_lossy().into_owned();
    let begun = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let out = std::thread::spawn(move || read(stdout, begun, has_come));
    let err = std::thread::spawn(move || read(stderr, begun, |_| false));
    let mut peak_memory = None;
    let status = loop {
        peak_memory = peak_memory_of(child.id()).or(peak_memory);
        if let Some(status) = child.try_wait().with_context(|| format!("cannot wait for {name}"))? {
            break status;
        }
        if begun.elapsed() > PATIENCE {
            // It may have ended just now; then there is nothing to kill.
            let _ = child.kill();
            bail!("{name} did not end within {} minutes", PATIENCE.as_secs() / 60);
        }
        std::thread::sleep(LOOK);
    };
    let (Ok((stdout, first)), Ok((stderr, _))) = (out.join(), err.join()) else {
        bail!("cannot read what {name} prints");
    };
    if !status.success() {
        bail!("{name} {}", failure(status, &stderr));
    }
    Ok(Ran { stdout, stderr, first, peak_memory })
}

/// All that comes, and when what is waited for had come.
fn read(from: Option<impl Read>, begun: Instant, has_come: fn(&[u8]) -> bool) -> (String, Option<Duration>) {
    let (mut all, mut first, mut chunk) = (Vec::new(), None, [0; 4096]);
    if let Some(mut from) = from {
        while let Ok(count @ 1..) = from.read(&mut chunk) {
            all.extend_from_slice(&chunk[..count]);
            if first.is_none() && has_come(&all) {
                first = Some(begun.elapsed());
            }
        }
    }
    (String::from_utf8_lossy(&all).into_owned(), first)
}

fn failure(status: ExitStatus, stderr: &str) -> String {
    let said = stderr.lines().rev().find(|line| !line.trim().is_empty());
    format!("failed ({status}){}", said.map(|line| format!(": {}", line.trim())).unwrap_or_default())
}
