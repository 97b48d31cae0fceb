//! A minimal HTTP/1.1 server for an API: one request after the other, with passed files.

use std::{
    io::{self, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::Value;

use super::{behaviour::Fault, vm::Vm};

pub struct Request {
    pub method: String,
    pub path: String,
    pub body: Vec<u8>,
    pub passed: Vec<OwnedFd>,
}

/// An answer: a status and a body.
pub struct Answer {
    pub status: u16,
    pub body: Option<Value>,
}

/// Reads a stream together with the files that are passed on it.
struct Receiver<'a> {
    stream: &'a UnixStream,
    passed: Vec<OwnedFd>,
}

impl Read for Receiver<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(self.stream, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.passed.extend(files);
            }
        }
        Ok(received.bytes)
    }
}

/// Answers requests until the other side closes.
pub fn serve(mut stream: UnixStream, vm: &Vm) {
    while let Some(request) = receive(&stream) {
        let call = request.path.strip_prefix("/api/v1/").unwrap_or_default().to_owned();
        let answer = match vm.behaviour.faults.get(&call) {
            None => vm.answer(&call, &request),
            Some(Fault::Exits(status, words)) => {
                eprintln!("{words}");
                return vm.exit(*status);
            }
            Some(Fault::Silent) => loop {
                std::thread::park();
            },
            Some(Fault::Closes) => return,
            Some(Fault::Says(text)) => {
                let _ = stream.write_all(text.as_bytes());
                return;
            }
            Some(Fault::Huge(bytes)) => {
                let head = format!("HTTP/1.1 200 \r\nContent-Length: {bytes}\r\n\r\n");
                let _ = stream.write_all(head.as_bytes());
                let chunk = vec![b' '; 64 << 10];
                // Until the other side closes.
                while stream.write_all(&chunk).is_ok() {}
                return;
            }
            Some(Fault::Body(text)) => {
                let mut answer = vm.answer(&call, &request);
                answer.body = Some(Value::String(text.clone()));
                let _ = send(&mut stream, answer.status, text);
                continue;
            }
            Some(Fault::Refuses(status, words)) => vm.refusal(*status, words),
        };
        let body = answer.body.map(|body| body.to_string()).unwrap_or_default();
        if send(&mut stream, answer.status, &body).is_err() {
            return;
        }
        if call == "vmm.shutdown" {
            return vm.exit(0);
        }
    }
}

fn send(stream: &mut UnixStream, status: u16, body: &str) -> io::Result<()> {
    let length = match status {
        204 => String::new(),
        _ => format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()),
    };
    let answer =
        format!("HTTP/1.1 {status} \r\nServer: a double\r\nConnection: keep-alive\r\n{length}\r\n{body}");
    stream.write_all(answer.as_bytes())
}

/// Returns the next request; none at the end.
fn receive(stream: &UnixStream) -> Option<Request> {
    let mut receiver = Receiver { stream, passed: Vec::new() };
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if receiver.read(&mut byte).ok()? == 0 {
            return None;
        }
        head.extend(byte);
    }
    let head = String::from_utf8(head).ok()?;
    let mut lines = head.lines();
    let mut words = lines.next()?.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let length = lines
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .map_or(0, |(_, length)| length.trim().parse().unwrap());
    let mut body = vec![0; length];
    receiver.read_exact(&mut body).ok()?;
    Some(Request { method, path, body, passed: receiver.passed })
}
