use super::tandem;

#[test]
fn help_texts() {
    for command in [
        "",
        "run",
        "serve",
        "export",
        "pull",
        "list",
        "rm",
        "doctor",
        "bench",
        "audit",
        "inspect",
        "completions",
    ] {
        let args: Vec<&str> = [command, "--help"].into_iter().filter(|a| !a.is_empty()).collect();
        let name = if command.is_empty() { "tandem" } else { command };
        insta::assert_snapshot!(format!("help-{name}"), tandem(&args).ok());
    }
}

#[test]
fn completions_exist_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = tandem(&["completions", shell]).ok();
        assert!(script.contains("max-tokens") && script.contains("doctor"), "{shell}");
    }
}

/// A completion script that its shell cannot read helps nobody.
#[test]
#[cfg(unix)]
fn bash_reads_its_completion_script() {
    let script = tandem(&["completions", "bash"]).ok();
    let bash = std::process::Command::new("bash").args(["-n", "-c", &script]).output().unwrap();
    assert!(bash.status.success() && bash.stderr.is_empty());
}

#[test]
fn the_version_is_shown() {
    assert_eq!(tandem(&["--version"]).ok(), format!("tandem {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn doctor_knows_this_machine_or_says_unknown() {
    let text = tandem(&["doctor"]).ok();
    for name in ["version", "cpu features", "kernels", "memory", "huge pages", "engines", "mlx", "store"] {
        assert!(text.lines().any(|line| line.starts_with(name)), "{name} is not in\n{text}");
    }
    let json: serde_json::Value = serde_json::from_str(&tandem(&["doctor", "--json"]).ok()).unwrap();
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(json["engines"][0], "cpu");
    assert!(json["mlx"]["version"].is_string() != json["mlx"]["missing"].is_string(), "{}", json["mlx"]);
    let supported = json["kernels"]["supported"].as_array().unwrap();
    assert!(supported.contains(&json["kernels"]["live"]));
    assert_eq!(json["models"], 0);
}

#[test]
fn doctor_says_which_kernels_were_forced_and_fails_where_they_cannot_run() {
    let text = tandem(&["doctor"]).env("TANDEM_KERNELS", "scalar").ok();
    assert!(text.contains("scalar (TANDEM_KERNELS says so)"), "{text}");
    let ran = tandem(&["doctor"]).env("TANDEM_KERNELS", "abacus").run();
    assert_eq!(ran.code, Some(1));
    assert!(ran.out.contains("none (") && ran.out.contains("abacus"), "{}", ran.out);
}
