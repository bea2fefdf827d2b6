//! Which engine serves a request, and why.
//!
//! A [`Coordinator`] is a registry: models by name, and for each its engines, an actor each. Engines run beside each
//! other, and requests within one are batched. A request that names an engine gets that one or an error. For the others
//! the engines that cannot serve it are set aside, each with its reason, and a [`Policy`] chooses among the rest. An
//! engine that is full when the request arrives is set aside too, and the policy is asked again.
//!
//! An engine that is loading can serve, but only after all that are ready: its requests wait for it.

mod policy;
mod refusal;

use std::collections::BTreeMap;
use std::time::Duration;

use tandem_engine::{Capabilities, EngineError, EngineFactory, Memory};

use crate::actor::Options;
use crate::load::{Load, LoadState};
use crate::message::{Request, Route};
use crate::{Actor, RuntimeError, TokenStream};

pub use policy::{Candidate, Choice, Policy, Shape, Threshold};
pub use refusal::{Refusal, RouteError};

/// Between two looks at engines that are being built.
const GLANCE: Duration = Duration::from_millis(2);

/// The engines of all models.
#[derive(Debug)]
pub struct Coordinator {
    models: BTreeMap<String, Vec<Member>>,
    policy: Box<dyn Policy>,
}

/// An engine of a model.
#[derive(Debug)]
struct Member {
    name: String,
    actor: Actor,
}

/// What was decided about a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Who serves it, and why in words.
    pub route: Route,
    /// Why, as one word for counters.
    pub kind: &'static str,
}

/// Requests under way.
#[derive(Debug)]
pub struct Routed {
    /// One for each request, in order. Their `Done` carries the route.
    pub streams: Vec<TokenStream>,
    /// Who serves them.
    pub decision: Decision,
}

/// What an engine would do with a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Prospect {
    /// Its name.
    pub engine: String,
    /// How it is.
    pub load: Load,
    /// Why it cannot serve the request, if it cannot.
    pub refusal: Option<Refusal>,
}

impl Default for Coordinator {
    fn default() -> Self {
        Self::new(Threshold::default())
    }
}

impl Coordinator {
    /// A registry without models.
    pub fn new(policy: impl Policy + 'static) -> Self {
        Self { models: BTreeMap::new(), policy: Box::new(policy) }
    }

    /// Starts an engine for `model`, which it may share with others. Its `engine` name is what requests and routes call
    /// it. Does not wait until it is built.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn add(
        &mut self,
        model: &str,
        engine: &str,
        factory: Box<dyn EngineFactory>,
        options: &Options,
    ) -> std::io::Result<()> {
        let member = Member { name: engine.to_owned(), actor: Actor::spawn(factory, options)? };
        self.models.entry(model.to_owned()).or_default().push(member);
        Ok(())
    }

    /// Waits until an engine of `model` can serve, or the one named.
    ///
    /// # Errors
    /// None of them could be built; the error is that of the last. [`RouteError`] if there is no such.
    pub fn ready(&self, model: &str, engine: Option<&str>) -> Result<Capabilities, ReadyError> {
        let members = self.members(model)?;
        let wanted = match engine {
            Some(engine) => std::slice::from_ref(&members[find(members, engine)?]),
            None => members,
        };
        loop {
            let mut failure = Some(RuntimeError::ShutDown);
            for member in wanted {
                match member.actor.handle().load().state {
                    LoadState::Ready(capabilities) => return Ok(capabilities),
                    LoadState::Loading => failure = None,
                    LoadState::Failed { error, .. } => failure = failure.map(|_| error),
                    LoadState::Draining | LoadState::Stopped => {}
                }
            }
            if let Some(error) = failure {
                return Err(ReadyError::Engine(error));
            }
            std::thread::sleep(GLANCE);
        }
    }

    /// The engines of `model` with how each is, in the order in which they were added. Never waits.
    ///
    /// # Errors
    /// [`RouteError::NoModel`].
    pub fn loads(&self, model: &str) -> Result<Vec<(&str, Load)>, RouteError> {
        let members = self.members(model)?;
        Ok(members.iter().map(|member| (member.name.as_str(), member.actor.handle().load())).collect())
    }

    /// Decides who would serve a request now, or why nobody would, without running it, and says how each of the model's
    /// engines stands.
    ///
    /// # Errors
    /// [`RouteError::NoModel`], [`RouteError::NoEngine`].
    pub fn explain(
        &self,
        model: &str,
        shape: &Shape,
        engine: Option<&str>,
    ) -> Result<(Result<Decision, RouteError>, Vec<Prospect>), RouteError> {
        let members = self.members(model)?;
        if let Some(engine) = engine {
            find(members, engine)?;
        }
        let prospects = prospects(members, shape);
        let decided = self.decide(&prospects, shape, engine).map(|(_, decision)| decision);
        Ok((decided, prospects))
    }

    /// Lets the engine that is chosen, or the one named, serve `requests` together. Does not wait.
    ///
    /// # Errors
    /// Why no engine takes them. What an engine meets later comes as its stream's error.
    pub fn generate(
        &self,
        model: &str,
        requests: &[Request],
        engine: Option<&str>,
    ) -> Result<Routed, RouteError> {
        let members = self.members(model)?;
        if let Some(engine) = engine {
            find(members, engine)?;
        }
        let shape = Shape::of(requests);
        let mut prospects = prospects(members, &shape);
        // Each turn sets one engine aside, so this ends.
        loop {
            let (index, decision) = self.decide(&prospects, &shape, engine)?;
            let handle = members[index].actor.handle();
            let started: Result<Vec<_>, _> = requests.iter().map(|r| handle.generate(r.clone())).collect();
            let refused = match started {
                Ok(streams) => {
                    let route = |stream: TokenStream| stream.routed(decision.route.clone());
                    return Ok(Routed { streams: streams.into_iter().map(route).collect(), decision });
                }
                Err(RuntimeError::Busy { limit, .. }) if requests.len() > limit => {
                    Refusal::TooMany { wanted: requests.len(), limit }
                }
                Err(busy @ RuntimeError::Busy { .. }) => Refusal::Busy(busy),
                Err(error) => Refusal::Ending(error),
            };
            prospects[index].refusal = Some(refused);
        }
    }

    /// Lets all engines take no more requests and end when they have answered those they have; what is left after
    /// `timeout` ends with an error. Does not wait.
    pub fn drain(&self, timeout: Duration) {
        for member in self.models.values().flatten() {
            member.actor.handle().drain(timeout);
        }
    }

    /// Ends all requests and engines. Does not wait.
    pub fn shutdown(&self) {
        for member in self.models.values().flatten() {
            member.actor.handle().shutdown();
        }
    }

    fn members(&self, model: &str) -> Result<&[Member], RouteError> {
        let members = self.models.get(model).map(Vec::as_slice);
        members.ok_or_else(|| RouteError::NoModel { model: model.to_owned() })
    }

    /// Who of `prospects` serves, by index.
    fn decide(
        &self,
        prospects: &[Prospect],
        shape: &Shape,
        engine: Option<&str>,
    ) -> Result<(usize, Decision), RouteError> {
        let decided = |index: usize, kind, reason| {
            let route = Route { engine: prospects[index].engine.clone(), reason };
            Ok((index, Decision { route, kind }))
        };
        if let Some(engine) = engine
            && let Some(index) = prospects.iter().position(|p| p.engine == engine)
        {
            return match &prospects[index].refusal {
                None | Some(Refusal::Loading) => decided(index, "asked", "asked for by name".to_owned()),
                Some(refusal) => {
                    Err(RouteError::Asked { engine: engine.to_owned(), refusal: refusal.clone() })
                }
            };
        }
        let (able, candidates): (Vec<usize>, Vec<Candidate<'_>>) =
            prospects.iter().enumerate().filter_map(|(i, p)| Some((i, p.candidate()?))).unzip();
        let aside: Vec<&Prospect> = prospects.iter().filter(|p| p.refusal.is_some()).collect();
        match (able.as_slice(), aside.as_slice()) {
            ([index], []) => decided(*index, "only", "the only engine".to_owned()),
            ([index], [first, ..]) => {
                let kind = first.refusal.as_ref().map_or("only", Refusal::kind);
                decided(*index, kind, around(&aside))
            }
            ([_, _, ..], _) => {
                let Choice { index, kind, reason } = self.policy.choose(shape, &candidates);
                let reason = if aside.is_empty() { reason } else { format!("{reason}; {}", around(&aside)) };
                decided(able[index], kind, reason)
            }
            ([], _) => {
                let loading = prospects.iter().position(|p| p.refusal == Some(Refusal::Loading));
                let Some(index) = loading else {
                    let refused = |p: &Prospect| Some((p.engine.clone(), p.refusal.clone()?));
                    return Err(RouteError::Nobody(prospects.iter().filter_map(refused).collect()));
                };
                match prospects {
                    [_] => decided(index, "only", "the only engine".to_owned()),
                    _ => {
                        let others: Vec<_> =
                            aside.into_iter().filter(|p| p.engine != prospects[index].engine).collect();
                        decided(index, "loading", format!("it is loading, but {}", around(&others)))
                    }
                }
            }
        }
    }
}

/// Why no engine of a model can serve.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ReadyError {
    /// There is no such.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// It could not be built.
    #[error(transparent)]
    Engine(RuntimeError),
}

impl Prospect {
    fn candidate(&self) -> Option<Candidate<'_>> {
        let LoadState::Ready(capabilities) = &self.load.state else { return None };
        let requests = self.load.running + self.load.waiting;
        self.refusal.is_none().then_some(Candidate { engine: &self.engine, capabilities, requests })
    }
}

fn find(members: &[Member], engine: &str) -> Result<usize, RouteError> {
    let known = || members.iter().map(|member| member.name.clone()).collect();
    let index = members.iter().position(|member| member.name == engine);
    index.ok_or_else(|| RouteError::NoEngine { engine: engine.to_owned(), known: known() })
}

/// How each engine stands to a request of this shape.
fn prospects(members: &[Member], shape: &Shape) -> Vec<Prospect> {
    let prospect = |member: &Member| {
        let load = member.actor.handle().load();
        let refusal = match &load.state {
            LoadState::Loading => Some(Refusal::Loading),
            LoadState::Failed { error, retry_in } => {
                Some(Refusal::Failed { error: error.clone(), retry_in: *retry_in })
            }
            LoadState::Draining => Some(Refusal::Ending(RuntimeError::Draining)),
            LoadState::Stopped => Some(Refusal::Ending(RuntimeError::ShutDown)),
            LoadState::Ready(capabilities) => unfit(capabilities, &load.memory, shape).map(Refusal::Unfit),
        };
        Prospect { engine: member.name.clone(), load, refusal }
    };
    members.iter().map(prospect).collect()
}

/// Why an engine could never serve a request of this shape.
fn unfit(capabilities: &Capabilities, memory: &Memory, shape: &Shape) -> Option<EngineError> {
    let limit = capabilities.context;
    let needed = shape.prompt.saturating_add(shape.max_tokens.unwrap_or(1));
    if needed > limit {
        return Some(EngineError::ContextOverflow { needed, limit });
    }
    let bytes = (needed as u64).saturating_mul(capabilities.kv_bytes_per_token);
    // Until its first look at the engine an actor does not know the limit.
    (memory.kv_limit > 0 && bytes > memory.kv_limit).then(|| EngineError::OutOfMemory {
        what: format!("the KV cache of {needed} tokens"),
        needed: bytes,
        available: memory.kv_limit,
        hint: "ask for fewer tokens, lower --context or raise --memory-budget".to_owned(),
    })
}

/// Who was set aside, and why, on one line.
fn around(aside: &[&Prospect]) -> String {
    let words = |p: &&Prospect| {
        let words = match p.refusal.as_ref()? {
            Refusal::Loading => "is loading".to_owned(),
            Refusal::Failed { error, .. } => format!("has failed: {error}"),
            Refusal::Ending(_) => "is being shut down".to_owned(),
            Refusal::Busy(error) => format!("is busy: {error}"),
            Refusal::TooMany { wanted, limit } => format!("takes {limit} requests, not {wanted}"),
            Refusal::Unfit(error) => format!("cannot: {error}"),
        };
        // A hint is for who can act on it.
        let words = words.split(". hint: ").next().unwrap_or_default();
        Some(format!("{} {words}", p.engine))
    };
    aside.iter().filter_map(words).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests;
