//! Ctrl-C ends a measurement, not the program: pods are removed and what was measured is written.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Returns a token that the first SIGINT or SIGTERM cancels. Later signals have no effect: removing pods takes time.
pub fn on_signal() -> std::io::Result<CancellationToken> {
    let token = CancellationToken::new();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let cancel = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        eprintln!("ending: pods are being removed, what was measured is kept");
        cancel.cancel();
    });
    Ok(token)
}
