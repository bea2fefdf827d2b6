//! Random timelines: arrivals, chats that go on, cancels, slow readers, priorities, adapters, little memory. Whatever
//! happens around a request, its answer is what it gives alone and cold, and in the end no memory is held.

use std::path::Path;

use tandem_cpu::{CpuEngine, CpuOptions};
use tandem_engine::sampler::uniform;
use tandem_model::Checkpoint;

use super::*;

/// A request under way.
struct Live {
    id: RequestId,
    request: Request,
    reader: Receiver,
    /// One in so many rounds it reads; 1 reads at once.
    patience: u64,
    tokens: Vec<u32>,
    finished: bool,
}

/// What a reader met.
#[derive(PartialEq)]
enum Read {
    Nothing,
    Token,
    End,
}

/// What must have happened for a timeline to mean anything.
#[derive(Debug, Default)]
struct Seen {
    answered: usize,
    cancelled: usize,
    cached: usize,
    evicted: bool,
    preempted: u64,
}

struct Timeline<'a> {
    scheduler: Scheduler,
    /// What a request gives alone and cold.
    reference: &'a mut dyn FnMut(&Request) -> Vec<u32>,
    vocab: u32,
    context: usize,
    adapters: u32,
    places: Places,
    live: Vec<Live>,
    /// Prompts with their answers, which later prompts go on from.
    told: Vec<(Option<AdapterId>, Vec<u32>)>,
    seed: u64,
    drawn: u64,
    next_id: u64,
    seen: Seen,
}

impl<'a> Timeline<'a> {
    fn new(
        engine: Box<dyn Engine>,
        prefix_tokens: usize,
        seed: u64,
        reference: &'a mut dyn FnMut(&Request) -> Vec<u32>,
    ) -> Self {
        let capabilities = engine.capabilities();
        let (vocab, context) = (capabilities.vocab_size as u32, capabilities.context);
        let mut scheduler = Scheduler::new(engine, prefix_tokens);
        scheduler.now = ticking;
        let (places, live, told, seen) = (Places::new(100), Vec::new(), Vec::new(), Seen::default());
        let (adapters, drawn, next_id) = (0, 0, 0);
        Self {
            scheduler,
            reference,
            vocab,
            context,
            adapters,
            places,
            live,
            told,
            seed,
            drawn,
            next_id,
            seen,
        }
    }

    /// A number below `below`.
    fn draw(&mut self, below: usize) -> usize {
        self.drawn += 1;
        (uniform(self.seed, self.drawn) * below as f64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.draw(n) == 0
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.draw(self.vocab as usize) as u32).collect()
    }

    /// A prompt of its own, one of a few that begin alike, or one that goes on from an earlier answer, perhaps without
    /// a part of it, as templates drop earlier thinking.
    fn prompt(&mut self) -> (Option<AdapterId>, Vec<u32>) {
        let adapter = match self.draw(4) {
            0 if self.adapters > 0 => Some(AdapterId(self.draw(self.adapters as usize) as u32)),
            _ => None,
        };
        let longest = self.context / 3;
        let (adapter, mut prompt) = match self.draw(4) {
            0 => (adapter, Vec::new()),
            1 => {
                let (key, len) = (self.draw(3) as u32, 1 + self.draw(longest));
                (adapter, (0..len as u32).map(|i| (key * 31 + i * i * 7 + i) % self.vocab).collect())
            }
            _ if self.told.is_empty() => (adapter, Vec::new()),
            _ => {
                let which = self.draw(self.told.len());
                let (adapter, mut tokens) = self.told[which].clone();
                if self.one_in(3) {
                    let from = self.draw(tokens.len());
                    let count = self.draw(20).min(tokens.len() - from);
                    tokens.drain(from..from + count);
                }
                (adapter, tokens)
            }
        };
        prompt.truncate(longest);
        let most = if self.one_in(8) { longest } else { 12 };
        let more = 1 + self.draw(most);
        prompt.extend(self.tokens(more));
        (adapter, prompt)
    }

    fn arrive(&mut self) {
        let (adapter, tokens) = self.prompt();
        let room = self.context - tokens.len();
        let mut sample = SampleSpec::greedy();
        if self.one_in(2) {
            let seed = self.draw(1000) as u64;
            sample = SampleSpec { temperature: 0.8, frequency_penalty: 0.3, seed, ..sample };
        }
        let (limited, stops) = (!self.one_in(5), self.draw(3));
        let request = Request {
            sample,
            max_tokens: if limited { Some(1 + self.draw(room.min(30))) } else { None },
            stop_tokens: self.tokens(stops),
            // What is not limited by its tokens is by its context.
            context: Some(tokens.len() + 1 + self.draw(room.min(60))).filter(|_| !limited),
            adapter,
            priority: self.draw(3) as i8 - 1,
            tokens,
        };
        let (patience, capacity) =
            if self.one_in(4) { (20, 1 + self.draw(4)) } else { (1, 1 + self.draw(64)) };
        let (sender, reader) = channel(capacity, self.places.take().unwrap());
        self.next_id += 1;
        let id = RequestId(self.next_id);
        self.scheduler.accept(id, request.clone(), sender, Instant::now());
        self.live.push(Live { id, request, reader, patience, tokens: Vec::new(), finished: false });
    }

    /// Reads an event, if there is one.
    fn read(&mut self, index: usize) -> Read {
        let live = &mut self.live[index];
        let Some(taken) = live.reader.try_take() else { return Read::Nothing };
        match taken.expect("a stream ends with an event").event {
            Event::Token(token) => {
                live.tokens.push(token.id);
                Read::Token
            }
            Event::Error(error) => panic!("{:?}: {error}", live.request),
            Event::Done(done) => {
                let Live { request, tokens, finished, .. } = self.live.swap_remove(index);
                let mut expected = (self.reference)(&request);
                let stopped = matches!(done.reason, Reason::Stop { .. });
                assert!(done.usage.cached < request.tokens.len());
                assert_eq!(done.usage.generated, tokens.len() + usize::from(stopped));
                if finished && done.reason == Reason::Interrupted {
                    expected.truncate(tokens.len());
                }
                assert_eq!(tokens, expected, "{request:?}");
                self.seen.answered += 1;
                self.seen.cached += done.usage.cached;
                if self.told.len() > 8 {
                    let forgotten = self.draw(8);
                    self.told.swap_remove(forgotten);
                }
                self.told.push((request.adapter, [request.tokens, tokens].concat()));
                Read::End
            }
        }
    }

    fn round(&mut self) {
        if self.live.len() < 12 && self.one_in(3) {
            self.arrive();
        }
        if self.one_in(50) && !self.live.is_empty() {
            let gone = self.draw(self.live.len());
            let live = self.live.swap_remove(gone);
            self.scheduler.cancel(live.id);
            let expected = (self.reference)(&live.request);
            assert!(expected.starts_with(&live.tokens));
            self.seen.cancelled += 1;
        }
        if self.one_in(50) && !self.live.is_empty() {
            let ended = self.draw(self.live.len());
            self.live[ended].finished = true;
            self.scheduler.finish(self.live[ended].id, Reason::Interrupted);
        }
        let held = self.scheduler.prefixes.tokens();
        self.scheduler.step().unwrap();
        self.seen.evicted |= self.scheduler.prefixes.tokens() < held;
        for index in (0..self.live.len()).rev() {
            let patience = self.live[index].patience as usize;
            if self.one_in(patience) {
                while self.read(index) == Read::Token {
                    if patience > 1 {
                        break;
                    }
                }
            }
        }
    }

    fn run(mut self, steps: u64) -> Seen {
        while self.scheduler.steps < steps {
            self.round();
        }
        while let Some(last) = self.live.pop() {
            self.scheduler.cancel(last.id);
        }
        while self.scheduler.step().unwrap() {}
        self.scheduler.clear_prefixes();
        let memory = self.scheduler.engine().memory();
        assert_eq!((memory.kv_exclusive, memory.kv_shared), (0, 0), "KV is still held");
        assert_eq!(self.scheduler.prefixes.tokens(), 0);
        Seen { preempted: self.scheduler.preempted, ..self.seen }
    }
}

fn check(what: &str, seen: &Seen) {
    println!("{what}: {seen:?}");
    let much =
        seen.answered > 20 && seen.cancelled > 3 && seen.cached > 100 && seen.evicted && seen.preempted > 3;
    assert!(much, "{what}: too little happened: {seen:?}");
}

/// The fake engine in every kind it can stand for.
fn fakes() -> Vec<(&'static str, FakeEngine)> {
    let fake = |kv| FakeEngine::new(VOCAB, 128, kv);
    vec![
        ("dynamic", fake(400)),
        ("overlapping", fake(400).overlapping()),
        ("windowed", fake(250).windowed(24)),
        ("windowed and overlapping", fake(250).windowed(24).overlapping()),
        ("static", fake(400).fixed_shapes(&[1, 16])),
        ("static and overlapping, no chunk of one", fake(400).fixed_shapes(&[8, 32]).overlapping()),
        ("with adapters", fake(400).with_adapters(2)),
        ("with much memory and a small tree", fake(2000)),
    ]
}

fn fake_timelines(steps: u64) {
    for (i, (what, engine)) in fakes().into_iter().enumerate() {
        let adapters = if what == "with adapters" { 2 } else { 0 };
        let roomy = what == "with much memory and a small tree";
        let mut reference = expected;
        let tree = if roomy { 300 } else { 10_000 };
        let mut timeline = Timeline::new(Box::new(engine), tree, i as u64, &mut reference);
        timeline.adapters = adapters;
        let mut seen = timeline.run(steps);
        if roomy {
            assert_eq!(std::mem::replace(&mut seen.preempted, 99), 0, "there was memory for all");
        }
        check(what, &seen);
    }
}

#[test]
fn no_timeline_changes_an_answer_or_leaks() {
    fake_timelines(4_000);
}

/// A million steps. Run in the judged tier.
#[test]
fn judged_a_million_steps_change_no_answer_and_leak_nothing() {
    if std::env::var_os("TANDEM_JUDGED").is_none() {
        eprintln!("skipped: TANDEM_JUDGED is not set");
        return;
    }
    fake_timelines(125_000);
}

/// A fixture on the CPU engine, whose KV holds `kv_tokens` tokens.
fn cpu(fixture: &str, kv_tokens: Option<u64>, threads: usize) -> CpuEngine {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(fixture);
    let (decoder, weights) = Checkpoint::open_network(&folder).unwrap();
    let load = |budget: u64| {
        let options = CpuOptions {
            threads: Some(threads),
            context: Some(128),
            memory_budget: Some(budget),
            max_step_tokens: 64,
            max_batch: 6,
            ..CpuOptions::default()
        };
        CpuEngine::load(&decoder, weights.clone(), &options, &mut (Box::new(|_| ()) as _)).unwrap()
    };
    let roomy = load(64 << 20);
    let Some(kv_tokens) = kv_tokens else { return roomy };
    let spare = roomy.memory().kv_limit - kv_tokens * roomy.capabilities().kv_bytes_per_token;
    load((64 << 20) - spare)
}

/// What a request gives alone and cold, on one thread.
fn alone(engine: &mut CpuEngine, request: &Request) -> Vec<u32> {
    let max_len = request.max_tokens.map(|most| request.tokens.len() + most).or(request.context).unwrap();
    let seq = engine.open(max_len, None).unwrap();
    let sample = SampleSpec { generated_from: request.tokens.len(), ..request.sample.clone() };
    let mut tokens = Vec::new();
    let mut next = request.tokens.clone();
    while tokens.len() < max_len - request.tokens.len() {
        let mut out = RowOut::Nothing;
        let parts = next.len().div_ceil(64);
        for (i, part) in next.chunks(64).enumerate() {
            let want = if i + 1 == parts { Want::Sample(sample.clone()) } else { Want::Nothing };
            let ticket = engine.submit(&[Row { seq, input: Input::Tokens(part.to_vec()), want }]).unwrap();
            out = engine.collect(ticket).unwrap().remove(0);
        }
        let RowOut::Sampled(sampled) = out else { panic!("{out:?}") };
        if request.stop_tokens.contains(&sampled.token) {
            break;
        }
        tokens.push(sampled.token);
        next = vec![sampled.token];
    }
    engine.close(seq).unwrap();
    tokens
}

#[test]
fn ten_thousand_steps_of_the_cpu_engine_change_no_answer_and_leak_no_block() {
    for (seed, fixture) in ["llama-gqa", "mistral-window"].into_iter().enumerate() {
        let mut reference = cpu(fixture, None, 1);
        let mut reference = |request: &Request| alone(&mut reference, request);
        let engine = cpu(fixture, Some(480), 2);
        let seen = Timeline::new(Box::new(engine), 4000, seed as u64, &mut reference).run(5_000);
        check(fixture, &seen);
    }
}
