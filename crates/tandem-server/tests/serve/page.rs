//! The page in a real browser.

use std::process::Command;
use std::sync::atomic::Ordering;

use super::harness::{echo, judge};

#[test]
fn judged_the_page_in_chromium() {
    let Some(python) = judge() else { return };
    let (Some(chromium), Some(driver)) =
        (std::env::var_os("TANDEM_CHROMIUM"), std::env::var_os("TANDEM_CHROMEDRIVER"))
    else {
        assert!(std::env::var_os("TANDEM_NO_SKIP").is_none(), "Chromium is not here");
        eprintln!("SKIPPED: Chromium is not here");
        return;
    };
    let server = echo(Some("qwen2.5"));
    server.knobs.delay_ms.store(20, Ordering::Relaxed);
    let mut command = Command::new(python);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/judge_page.py"));
    command.arg(server.url("")).args([chromium, driver]);
    command.args(std::env::var_os("TANDEM_SCREENSHOTS"));
    assert!(command.env("no_proxy", "*").status().unwrap().success());
}
