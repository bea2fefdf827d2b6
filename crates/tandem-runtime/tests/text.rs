//! Text and stop strings over the whole way: engine, actor, stream.

use proptest::prelude::*;
use tandem_engine::fake::FakeEngine;
use tandem_engine::{Engine, SampleSpec};
use tandem_model::{Detokenizer, Tokenizer};
use tandem_runtime::{Actor, Done, Options, Reason, Request, TextEvent, TextStream};

const VOCAB: usize = 256;

/// Random bytes: nearly every token boundary is inside something.
fn request(prompt: u32) -> Request {
    let mut sample = SampleSpec::greedy();
    // Makes whole characters likely: ASCII, and the two bytes of ä, ö and the like.
    sample.logit_bias = (0..VOCAB as u32)
        .filter(|b| !matches!(b, 0x61..0x64 | 0xc3 | 0xa4..0xa6))
        .map(|b| (b, f32::NEG_INFINITY))
        .collect();
    Request {
        tokens: vec![prompt % 256, 7],
        sample,
        max_tokens: Some(60),
        stop_tokens: Vec::new(),
        context: None,
        adapter: None,
        priority: 0,
    }
}

fn read(stream: TextStream) -> (String, Vec<u32>, Done) {
    let (mut text, mut ids) = (String::new(), Vec::new());
    for event in stream {
        match event {
            TextEvent::Piece { text: piece, token } => {
                text += &piece;
                ids.extend(token.map(|t| t.id));
            }
            TextEvent::Done(done) => return (text, ids, done),
            TextEvent::Error(error) => panic!("{error}"),
        }
    }
    unreachable!("a stream ends with Done or Error")
}

proptest! {
    #[test]
    fn the_text_is_that_of_all_tokens_cut_at_the_first_stop_string(
        prompt in 0u32..256,
        cuts in prop::collection::vec((0usize..40, 1usize..6), 0..3),
    ) {
        let factory = || Ok(Box::new(FakeEngine::new(VOCAB, 512, 10_000)) as Box<dyn Engine>);
        let actor = Actor::spawn(Box::new(factory), &Options::default()).unwrap();
        let tokenizer = Tokenizer::bytes(VOCAB).unwrap();
        let text_of = |stops: Vec<String>| {
            let tokens = actor.handle().generate(request(prompt)).unwrap();
            read(TextStream::new(tokens, Detokenizer::new(&tokenizer, true), stops).unwrap())
        };

        let (whole, ids, done) = text_of(Vec::new());
        prop_assert_eq!(&whole, &tokenizer.decode(&ids, true));
        prop_assert_eq!((ids.len(), done.reason), (60, Reason::Length));

        let chars: Vec<char> = whole.chars().collect();
        let stops: Vec<String> =
            cuts.iter().map(|(at, len)| chars.iter().skip(*at).take(*len).collect::<String>()).collect();
        let stops: Vec<String> = stops.into_iter().filter(|s| !s.is_empty()).collect();
        let first = stops.iter().filter_map(|s| whole.find(s.as_str()).map(|at| (at + s.len(), at, s))).min();
        let (text, _, done) = text_of(stops.clone());
        match first {
            None => prop_assert_eq!((text, done.reason), (whole, Reason::Length)),
            Some((_, at, stop)) => {
                prop_assert_eq!(&text, &whole[..at]);
                prop_assert_eq!(done.reason, Reason::StopString { text: stop.clone() });
                // The KV of what was generated is there for the next turn.
                prop_assert_eq!(text_of(Vec::new()).2.usage.cached, 1);
            }
        }
    }
}
