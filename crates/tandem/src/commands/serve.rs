//! `tandem serve`.

use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use tandem_model::Checkpoint;
use tandem_runtime::{Coordinator, Threshold};
use tandem_server::{App, Model, Options};
use tandem_store::Store;

use crate::cli::ServeArgs;
use crate::progress::Download;

pub fn run(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    // Said before anything is fetched or loaded.
    let at = format!("{}:{}", args.host, args.port);
    let listener = TcpListener::bind((args.host.as_str(), args.port))
        .with_context(|| format!("cannot listen on {at} (hint: give another --host or --port)"))?;
    let address = listener.local_addr()?;
    let options = options(args);
    if !address.ip().is_loopback() && options.api_key.is_none() {
        eprintln!("note: anyone who reaches {address} can use this server; --api-key keeps others out");
    }

    let names = names(args, &fetch(&args.models)?)?;
    let mut coordinator = Coordinator::new(Threshold { cutoff: args.static_cutoff });
    let models = load(args, &names, &mut coordinator)?;
    for Names { id, given, .. } in &names {
        coordinator
            .ready(id, args.engine.engine.as_deref())
            .with_context(|| format!("cannot serve {given}"))?;
    }
    tandem_server::run(listener, Arc::new(App::new(models, coordinator, options)), || {
        let mut out = std::io::stdout();
        writeln!(out, "listening on http://{address}")?;
        out.flush()
    })?;
    Ok(ExitCode::SUCCESS)
}

fn options(args: &ServeArgs) -> Options {
    let defaults = Options::default();
    Options {
        api_key: args.api_key.clone().or_else(|| std::env::var("TANDEM_API_KEY").ok()),
        cors: args.cors.clone(),
        max_body: usize::try_from(args.max_body).unwrap_or(usize::MAX),
        head_timeout: args.timeout.unwrap_or(defaults.head_timeout),
        body_timeout: args.timeout.unwrap_or(defaults.body_timeout),
        write_timeout: args.timeout.unwrap_or(defaults.write_timeout),
        drain: args.drain_timeout,
    }
}

/// Finds the models, fetching them if need be.
fn fetch(models: &[String]) -> anyhow::Result<Vec<PathBuf>> {
    let store = Store::open(None)?;
    let mut download = Download::default();
    models.iter().map(|name| Ok(store.resolve(name, &mut download)?.path)).collect()
}

/// Opens the models and starts their engines.
fn load(args: &ServeArgs, names: &[Names], coordinator: &mut Coordinator) -> anyhow::Result<Vec<Model>> {
    let open = |names: &Names| {
        Checkpoint::open(&names.path).with_context(|| format!("cannot serve {}", names.given))
    };
    let checkpoints = names.iter().map(open).collect::<anyhow::Result<Vec<_>>>()?;
    let weights: Vec<u64> = checkpoints.iter().map(|checkpoint| checkpoint.weights.bytes()).collect();
    let budget = args.engine.load.memory_budget;
    let budgets = match weights.len() {
        1 => vec![budget],
        _ => budgets(budget.or_else(tandem_cpu::available_memory), &weights),
    };
    let parallel = args.parallel.get();
    let requests = tandem_runtime::Options {
        max_requests: parallel.saturating_add(args.queue),
        ..tandem_runtime::Options::default()
    };
    let mut models = Vec::new();
    for ((names, checkpoint), budget) in names.iter().zip(&checkpoints).zip(budgets) {
        let Names { id, aliases, given, .. } = names;
        crate::model::tell_not_honoured(checkpoint);
        let defaults = crate::model::sampling(&args.sampling, &checkpoint.generation);
        defaults.validate(checkpoint.decoder.vocab_size)?;
        let context = tandem::context(args.engine.context, checkpoint.decoder.max_context);
        let context = context.with_context(|| format!("cannot serve {given}"))?;
        let mut cpu = crate::model::options(&args.engine.load, args.engine.threads, context);
        (cpu.max_batch, cpu.memory_budget) = (parallel, budget);
        crate::model::start(coordinator, id, checkpoint, &args.engine, cpu, requests.clone())?;
        models.push(Model::new(id, aliases.clone(), checkpoint, defaults));
    }
    Ok(models)
}

/// Each model's part of one budget: its weights as they are stored, and an equal share of what is left.
fn budgets(budget: Option<u64>, weights: &[u64]) -> Vec<Option<u64>> {
    let left = |budget: u64| budget.saturating_sub(weights.iter().sum()) / weights.len() as u64;
    weights.iter().map(|own| budget.map(|budget| own + left(budget))).collect()
}

/// A model and what requests may call it.
#[derive(Debug, PartialEq)]
struct Names {
    /// As on the command line.
    given: String,
    path: PathBuf,
    id: String,
    aliases: Vec<String>,
}

/// The name a model was given, or the last part of a path, is its id. A hub id's last part and a file's name without
/// `.gguf` may be used too where only one model has them.
fn names(args: &ServeArgs, paths: &[PathBuf]) -> anyhow::Result<Vec<Names>> {
    if args.models.len() > 1 && !args.alias.is_empty() {
        bail!("--alias names the only model, and there are {}. hint: leave it out", args.models.len());
    }
    let mut all: Vec<Names> = Vec::new();
    for (given, path) in args.models.iter().zip(paths) {
        let id = id(given, path);
        if all.iter().any(|other| other.id == id) {
            bail!("two models are called `{id}`. hint: rename a folder or file, or serve them on two ports");
        }
        all.push(Names { given: given.clone(), path: path.clone(), id, aliases: args.alias.clone() });
    }
    let short: Vec<String> = all.iter().map(|names| short(&names.id).to_owned()).collect();
    for (index, name) in short.iter().enumerate() {
        let taken =
            all.iter().any(|n| n.id == *name) || short.iter().filter(|other| *other == name).count() > 1;
        if !taken && !all[index].aliases.contains(name) {
            all[index].aliases.push(name.clone());
        }
    }
    Ok(all)
}

/// What requests call the model.
fn id(name: &str, path: &Path) -> String {
    let file = Path::new(name).exists().then(|| path.canonicalize().ok()).flatten();
    let file = file.as_deref().and_then(Path::file_name);
    file.map_or_else(|| name.to_owned(), |file| file.to_string_lossy().into_owned())
}

fn short(id: &str) -> &str {
    let last = id.rsplit('/').next().unwrap_or(id);
    last.strip_suffix(".gguf").unwrap_or(last)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn names_of(arguments: &[&str]) -> anyhow::Result<Vec<(String, Vec<String>)>> {
        let cli = Cli::try_parse_from(["tandem", "serve"].iter().chain(arguments)).unwrap();
        let Command::Serve(args) = cli.command else { panic!("not serve") };
        let paths: Vec<PathBuf> = args.models.iter().map(PathBuf::from).collect();
        Ok(names(&args, &paths)?.into_iter().map(|names| (names.id, names.aliases)).collect())
    }

    #[test]
    fn a_model_has_its_name_and_a_short_one_where_that_is_its_own() {
        let one =
            |id: &str, aliases: &[&str]| (id.to_owned(), aliases.iter().map(ToString::to_string).collect());
        assert_eq!(names_of(&["smollm2"]).unwrap(), [one("smollm2", &[])]);
        assert_eq!(names_of(&["a/b", "-a", "x", "-a", "b"]).unwrap(), [one("a/b", &["x", "b"])]);
        assert_eq!(
            names_of(&["a/b", "c/b", "d/e", "f:g.gguf"]).unwrap(),
            [one("a/b", &[]), one("c/b", &[]), one("d/e", &["e"]), one("f:g.gguf", &["f:g"])]
        );
        assert!(names_of(&["a/b", "a/b"]).unwrap_err().to_string().contains("two models are called `a/b`"));
        assert!(names_of(&["a/b", "c/d", "-a", "x"]).unwrap_err().to_string().contains("there are 2"));
    }

    #[test]
    fn one_budget_covers_all_weights_and_what_is_left_is_shared() {
        assert_eq!(budgets(Some(1000), &[100, 500]), [Some(300), Some(700)]);
        // Too little for both: the engines say so with their own numbers.
        assert_eq!(budgets(Some(500), &[100, 500]), [Some(100), Some(500)]);
        assert_eq!(budgets(None, &[1, 2]), [None, None]);
    }
}
