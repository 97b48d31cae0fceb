//! Serves ttrpc on the connections that the front passes on.
//!
//! containerd keeps one connection per container, and a call that waits for the container's exit. ttrpc's own server
//! has two tasks and space for 32 messages per connection, which is 11 KiB per pod in the daemon. Here a connection is
//! one task with a queue of bytes.
//!
//! ```text
//! connection ─▶ request ─▶ task of the request ─▶ response ─▶ queue ─▶ connection
//! ```

use std::{collections::HashMap, future::poll_fn, io, sync::Arc, task::Poll, time::Duration};

use protobuf::Message;
use sandboxer_protocol::frames::{Incoming, Outgoing, too_long};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::UnixStream,
    sync::mpsc,
    task::JoinSet,
    time::timeout,
};
use tokio_util::task::AbortOnDropHandle;
use ttrpc::{
    Code, Error, MessageHeader, Request, Response, Status,
    asynchronous::{Service, TtrpcContext},
    context, get_status,
    proto::{MESSAGE_LENGTH_MAX, MESSAGE_TYPE_REQUEST},
};

/// Services by name.
type Services = Arc<HashMap<String, Service>>;

/// Maximum bytes of waiting responses; while they are exceeded, no request is read.
const MAX_WAITING: usize = 1 << 20;

/// Serves these connections until the returned future is dropped.
pub fn serve(
    mut connections: mpsc::Receiver<io::Result<UnixStream>>,
    services: HashMap<String, Service>,
) -> AbortOnDropHandle<()> {
    let services = Arc::new(services);
    AbortOnDropHandle::new(tokio::spawn(async move {
        let mut served = JoinSet::new();
        loop {
            tokio::select! {
                connection = connections.recv() => match connection {
                    Some(Ok(connection)) => drop(served.spawn(serve_one(connection, services.clone()))),
                    Some(Err(error)) => tracing::debug!(%error, "a task connection was lost"),
                    // The front is gone, so this process ends soon.
                    None => return std::future::pending().await,
                },
                Some(_) = served.join_next() => {}
            }
        }
    }))
}

/// Serves one connection until it ends. Its pending requests end with it.
async fn serve_one(mut stream: impl AsyncRead + AsyncWrite + Unpin, services: Services) {
    let (mut incoming, mut outgoing) = (Incoming::default(), Outgoing::default());
    let mut requests = JoinSet::new();
    let end = poll_fn(|cx| {
        loop {
            while let Poll::Ready(Some(responded)) = requests.poll_join_next(cx) {
                // A task that panicked has no response.
                if let Ok((stream, response)) = responded {
                    respond(&mut outgoing, stream, response);
                }
            }
            if let Err(error) = outgoing.write(cx, &mut stream) {
                return Poll::Ready(error);
            }
            if outgoing.len() >= MAX_WAITING {
                return Poll::Pending;
            }
            match incoming.poll(cx, &mut stream, |_| Ok(())) {
                Poll::Ready(Ok((head, payload))) => {
                    let work = handle(services.clone(), head, payload);
                    requests.spawn(async move { (head.stream_id, work.await) });
                }
                Poll::Ready(Err(error)) => return Poll::Ready(error),
                Poll::Pending => return Poll::Pending,
            }
        }
    });
    let error = end.await;
    tracing::debug!(%error, "a task connection ended");
}

/// Queues a response.
fn respond(outgoing: &mut Outgoing, stream: u32, response: Response) {
    let mut payload = response.write_to_bytes().unwrap_or_default();
    if payload.len() > MESSAGE_LENGTH_MAX {
        let refused = refused(Code::INVALID_ARGUMENT, too_long(payload.len()));
        payload = refused.write_to_bytes().unwrap_or_default();
    }
    outgoing.push(&Vec::from(MessageHeader::new_response(stream, payload.len() as u32)));
    outgoing.push(&payload);
}

fn refused(code: Code, text: impl ToString) -> Response {
    with_status(get_status(code, text))
}

fn with_status(status: Status) -> Response {
    Response { status: Some(status).into(), ..Default::default() }
}

/// Handles a request.
async fn handle(services: Services, head: MessageHeader, payload: Vec<u8>) -> Response {
    if head.stream_id % 2 != 1 {
        return refused(Code::INVALID_ARGUMENT, "stream id must be odd");
    }
    if head.type_ != MESSAGE_TYPE_REQUEST {
        return refused(Code::INVALID_ARGUMENT, "Stream is no longer active");
    }
    let request = match Request::parse_from_bytes(&payload) {
        Ok(request) => request,
        Err(error) => return refused(Code::INVALID_ARGUMENT, error),
    };
    drop(payload);
    let Some(service) = services.get(&request.service) else {
        return refused(Code::INVALID_ARGUMENT, format!("{} service does not exist", request.service));
    };
    let Some(method) = service.methods.get(&request.method) else {
        return refused(Code::UNIMPLEMENTED, format!("{} method", request.method));
    };
    let limit = u64::try_from(request.timeout_nano).ok().filter(|&nanos| nanos > 0);
    let context = TtrpcContext {
        mh: head,
        metadata: context::from_pb(&request.metadata),
        timeout_nano: request.timeout_nano,
        connection_data: Arc::default(),
    };
    let work = method.handler(context, request);
    let response = match limit.map(Duration::from_nanos) {
        None => work.await,
        // Boxed: a request without a limit may wait for long, and needs no timer.
        Some(limit) => match Box::pin(timeout(limit, work)).await {
            Ok(response) => response,
            Err(_) => return refused(Code::DEADLINE_EXCEEDED, "timeout"),
        },
    };
    response.unwrap_or_else(|error| match error {
        Error::RpcStatus(status) => with_status(status),
        error => refused(Code::UNKNOWN, error),
    })
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use sandboxer_front::frame::REPEATED;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use ttrpc::{
        asynchronous::MethodHandler,
        proto::{MESSAGE_HEADER_LENGTH, MESSAGE_TYPE_RESPONSE},
    };

    use super::*;

    /// A service that returns the payload and the flags; `wait` never returns.
    struct Echo;

    #[async_trait]
    impl MethodHandler for Echo {
        async fn handler(&self, context: TtrpcContext, request: Request) -> ttrpc::Result<Response> {
            if request.payload == b"wait" {
                std::future::pending::<()>().await;
            }
            let payload = [request.payload, vec![context.mh.flags]].concat();
            Ok(Response { payload, ..Default::default() })
        }
    }

    fn client() -> DuplexStream {
        let (ours, theirs) = tokio::io::duplex(64);
        let methods = HashMap::from([("Echo".to_owned(), Box::new(Echo) as Box<_>)]);
        let service = Service { methods, streams: HashMap::new() };
        tokio::spawn(serve_one(theirs, Arc::new(HashMap::from([("s".to_owned(), service)]))));
        ours
    }

    fn call(stream: u32, flags: u8, method: &str, payload: &[u8], timeout_nano: i64) -> Vec<u8> {
        let (service, method, payload) = ("s".into(), method.into(), payload.to_vec());
        let request = Request { service, method, payload, timeout_nano, ..Default::default() };
        let bytes = request.write_to_bytes().unwrap();
        let mut head = MessageHeader::new_request(stream, bytes.len() as u32);
        head.set_flags(flags);
        [Vec::from(head), bytes].concat()
    }

    async fn response(client: &mut DuplexStream) -> (u32, Response) {
        let mut head = [0; MESSAGE_HEADER_LENGTH];
        client.read_exact(&mut head).await.unwrap();
        let head = MessageHeader::from(&head[..]);
        assert_eq!(head.type_, MESSAGE_TYPE_RESPONSE);
        let mut bytes = vec![0; head.length as usize];
        client.read_exact(&mut bytes).await.unwrap();
        (head.stream_id, Response::parse_from_bytes(&bytes).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn each_request_is_answered_when_it_is_done() {
        let mut client = client();
        let calls = [
            call(1, 0, "Echo", b"wait", 0),
            call(3, 0, "Echo", b"wait", 1_000_000),
            call(5, REPEATED, "Echo", &[7; 1000], 0),
        ];
        for call in calls {
            client.write_all(&call).await.unwrap();
        }
        let (stream, echoed) = response(&mut client).await;
        assert_eq!((stream, echoed.payload), (5, [&[7; 1000][..], &[REPEATED]].concat()));
        let (stream, late) = response(&mut client).await;
        assert_eq!((stream, late.status().code()), (3, Code::DEADLINE_EXCEEDED));
    }

    #[tokio::test]
    async fn what_is_not_there_is_refused_and_the_connection_goes_on() {
        let mut client = client();
        client.write_all(&call(1, 0, "Other", b"", 0)).await.unwrap();
        assert_eq!(response(&mut client).await.1.status().code(), Code::UNIMPLEMENTED);
        client.write_all(&call(2, 0, "Echo", b"", 0)).await.unwrap();
        assert_eq!(response(&mut client).await.1.status().code(), Code::INVALID_ARGUMENT);
        let mut bad = call(3, 0, "Echo", b"", 0);
        *bad.last_mut().unwrap() = 0xff;
        client.write_all(&bad).await.unwrap();
        assert_eq!(response(&mut client).await.1.status().code(), Code::INVALID_ARGUMENT);
        client.write_all(&call(5, 0, "Echo", b"x", 0)).await.unwrap();
        assert_eq!(response(&mut client).await.1.payload, [b'x', 0]);
    }
}
