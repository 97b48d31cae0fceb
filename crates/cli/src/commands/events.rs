//! `events`: the stream of events.

use sandboxer_protocol::admin::{Event, EventsRequest};
use tokio_stream::StreamExt;

use crate::{Global, client, client::ClientError, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli events --follow
  sandboxer-cli events --follow --pod 3f2a
  sandboxer-cli events --follow --json | jq -r 'select(.kind == \"pod-ready\") | .pod'

With --json each event is one line.";

/// Print events of pods and containers as they happen, until interrupted
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Follow the stream; required, because the daemon stores no past events
    #[arg(short, long, required = true)]
    follow: bool,
    /// Print only events of pods with this id prefix
    #[arg(short, long, value_name = "ID", default_value = "", hide_default_value = true)]
    pod: String,
}

/// Prints events until the stream ends.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let mut daemon = client::connect(&global.socket).await?;
    let mut events = client::answer(daemon.events(EventsRequest {}).await)?;
    while let Some(event) = events.next().await {
        let event = event.map_err(ClientError::from)?;
        if !event.pod.starts_with(&args.pod) {
            continue;
        }
        render::print(&if global.json { serde_json::to_string(&event)? } else { line(&event) })?;
    }
    // The stream ends only when the daemon ends.
    Err(ClientError::Lost("it is shutting down".into()).into())
}

fn line(event: &Event) -> String {
    let mut line = format!(
        "{}  {:<17}  {}",
        render::time(event.at_ns),
        render::plain(&event.kind),
        render::short(&event.pod)
    );
    if !event.container.is_empty() {
        line += &format!("/{}", render::short(&event.container));
    }
    if !event.detail.is_empty() {
        line += "  ";
        line += &render::plain(&event.detail).replace('\n', " | ");
    }
    line
}
