use std::time::Instant;
fn main() {
    let path = std::env::args().nth(1).unwrap();
    let t = Instant::now();
    let c = match tandem_model::Checkpoint::open(path.as_ref()) { Ok(c) => c, Err(e) => { eprintln!("{e}"); std::process::exit(1) } };
    eprintln!("open {:?}", t.elapsed());
    eprintln!("{:?} {:?} {} tensors", c.generation, c.tokenizer, c.weights.iter().count());
    let ids = c.tokenizer.encode("Hello world, it's 2024!\n  The <|im_end|> naïve 日本 🙂", true).unwrap();
    eprintln!("{ids:?} {:?}", c.tokenizer.decode(&ids, false));
    if let Some(chat) = &c.chat { println!("{:?}", chat.render(&[tandem_model::Message::new("user","hi")], &tandem_model::RenderOptions{add_generation_prompt:true,..Default::default()})); }
}
