//! `tandem serve`.

use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use tandem_model::Checkpoint;
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
    let options = Options {
        api_key: args.api_key.clone().or_else(|| std::env::var("TANDEM_API_KEY").ok()),
        cors: args.cors.clone(),
        ..Options::default()
    };
    if !address.ip().is_loopback() && options.api_key.is_none() {
        eprintln!("note: anyone who reaches {address} can use this server; --api-key keeps others out");
    }

    let mut download = Download::default();
    let path = Store::open(None)?.resolve(&args.model, &mut download)?.path;
    drop(download);
    let checkpoint = Checkpoint::open(&path)?;
    crate::model::tell_not_honoured(&checkpoint);
    let context = crate::model::context(args.engine.context, checkpoint.decoder.max_context)?;
    let defaults = crate::model::sampling(&args.sampling, &checkpoint.generation);
    defaults.validate(checkpoint.decoder.vocab_size)?;

    let actor = crate::model::start(&checkpoint, &args.engine, context)?;
    let model = Model::new(id(&args.model, &path), &checkpoint, defaults, actor.handle())?;
    drop(checkpoint);
    let mut out = std::io::stdout();
    writeln!(out, "listening on http://{address}")?;
    out.flush()?;
    tandem_server::run(listener, Arc::new(App::new(model, options)))?;
    Ok(ExitCode::SUCCESS)
}

/// What requests call the model: the name it was given, or the last part of a path.
fn id(name: &str, path: &Path) -> String {
    let file = Path::new(name).exists().then(|| path.canonicalize().ok()).flatten();
    let file = file.as_deref().and_then(Path::file_name);
    file.map_or_else(|| name.to_owned(), |file| file.to_string_lossy().into_owned())
}
