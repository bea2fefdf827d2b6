//! Tandem inside a program of yours: `cargo run --release --example embed -- path/to/model`.

use tandem::{Ask, Error, Message, Model, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: embed MODEL")?;
    Ok(run(&path)?)
}

/// What a program does with a model.
pub fn run(path: &str) -> Result<(), Error> {
    // Load: a Hugging Face folder or a .gguf file.
    let model = Model::load(path, &Options::default())?;

    // Generate, and stream: text comes in pieces.
    let ask = Ask { max_tokens: Some(20), ..Ask::default() };
    let mut answer = model.chat(&[Message::new("user", "Name a colour.")], &ask)?;
    for piece in &mut answer {
        print!("{}", piece?);
    }
    if let Some(done) = answer.done() {
        println!("\n{} tokens by {}: {}", done.usage.generated, done.route.engine, done.route.reason);
    }

    // Cancel: drop the answer. All it holds is freed before the engine's next step.
    let mut story = model.complete("Once upon a time", &Ask::default())?;
    println!("{}", story.next().transpose()?.unwrap_or_default());
    drop(story);
    Ok(())
}
