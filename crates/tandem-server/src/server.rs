//! Connections: limits on how many and how slow, and an end that waits for answers under way.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::App;
use crate::patience::Patient;

/// Most connections at once; others wait to be accepted.
const MAX_CONNECTIONS: usize = 1024;

/// After an accept that failed (no file descriptors left, say).
const BREATH: Duration = Duration::from_millis(50);

/// For the last words to reach clients whose answers were ended.
const FAREWELL: Duration = Duration::from_secs(2);

/// Threads for connections; the engine computes on its own.
const THREADS: usize = 2;

/// Most threads that render and tokenize prompts.
const BLOCKING_THREADS: usize = 16;

/// Serves `app` until the process is told to end (Ctrl-C, SIGTERM); then lets answers under way end, or a second signal
/// end the process at once. `ready` is called once clients and signals are heard.
///
/// # Errors
/// If the system gives no threads or signals, the socket cannot be used, or `ready` fails.
pub fn run(
    listener: std::net::TcpListener,
    app: Arc<App>,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let mut signals = Signals::new()?;
        ready()?;
        let told = async move {
            signals.next().await;
            eprintln!("ending: answers under way are finished; once more ends at once");
            tokio::spawn(async move {
                signals.next().await;
                std::process::exit(130);
            });
        };
        serve(listener, app, told).await;
        Ok(())
    })
}

/// Serves `app` until `told`; then waits for answers under way, at most as long as the options say. After that they end
/// with an error, and so do the engines. Whoever comes meanwhile is told that the server is ending.
pub async fn serve(listener: TcpListener, app: Arc<App>, told: impl Future<Output = ()>) {
    let service = TowerToHyperService::new(app.router());
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(app.options.head_timeout);
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let connect = |http: &http1::Builder, socket: TcpStream| {
        // Tokens are small and wanted at once.
        let _ = socket.set_nodelay(true);
        let socket = TokioIo::new(Patient::new(socket, app.options.write_timeout));
        http.serve_connection(socket, service.clone())
    };

    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    let mut told = pin!(told);
    loop {
        let (socket, place) = tokio::select! {
            () = &mut told => break,
            accepted = accept(&listener, &places) => accepted,
        };
        let connection = graceful.watch(connect(&http, socket));
        connections.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection");
            }
            drop(place);
        });
        while connections.try_join_next().is_some() {}
    }

    app.end();
    http.keep_alive(false);
    let mut late = JoinSet::new();
    let mut ended = pin!(timeout(app.options.drain + FAREWELL, graceful.shutdown()));
    let in_time = loop {
        let (socket, place) = tokio::select! {
            in_time = &mut ended => break in_time.is_ok(),
            accepted = accept(&listener, &places) => accepted,
        };
        let connection = connect(&http, socket);
        late.spawn(async move {
            let _ = connection.await;
            drop(place);
        });
    };
    drop(listener);
    if !in_time {
        tracing::warn!("some connections did not end; they are cut");
    }
    app.coordinator.shutdown();
    let _ = timeout(FAREWELL, async { while late.join_next().await.is_some() {} }).await;
}

/// The next connection, once there is a place for it.
async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> (TcpStream, Option<OwnedSemaphorePermit>) {
    // The semaphore is never closed.
    let place = Arc::clone(places).acquire_owned().await.ok();
    loop {
        match listener.accept().await {
            Ok((socket, _)) => return (socket, place),
            Err(error) => {
                tracing::warn!(%error, "accepting a connection");
                tokio::time::sleep(BREATH).await;
            }
        }
    }
}

/// What tells the process to end.
#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    /// From now on they do not end the process by themselves.
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        let _ = tokio::signal::ctrl_c().await;
    }
}
