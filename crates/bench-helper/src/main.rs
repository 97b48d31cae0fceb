//! Measurements for which distributions have no tool, inside a container of any runtime: prints one line of JSON.
//!
//! | module | what it holds |
//! |---|---|
//! | [`facts`] | processors, quota and memory of a container |
//! | [`run`], [`announce`] | runs a tool after printing the facts; reports when it listens |
//! | [`native`] | runs a command on the host in the unpacked image |
//! | [`guest`] | runs a command in a VM |
//! | [`calls`] | cost of a system call, of an allocation, of opening a file |
//! | [`frames`], [`spin`] | late frames, stolen time |
//! | [`mixed`] | small files, created, read, appended to and deleted |
//! | [`pipeline`] | the steps of a C++ build job |
//! | [`stream`] | TCP by message size, both ways |
//! | [`transactions`] | open-loop load over a working set |
//! | [`result`] | the printed line |

mod announce;
mod calls;
mod facts;
mod frames;
mod guest;
mod mixed;
mod native;
mod pipeline;
mod result;
mod run;
mod spin;
mod stream;
mod transactions;

use std::process::ExitCode;

use clap::Parser;

/// Measure inside a container and print one line of JSON
#[derive(Debug, Parser)]
enum Command {
    /// Print the processors, quota and memory of this container
    Facts,
    Run(run::Args),
    Native(native::Args),
    Guest(guest::Args),
    Announce(announce::Args),
    Syscalls(calls::Args),
    Alloc(calls::AllocArgs),
    Open(calls::OpenArgs),
    Frames(frames::Args),
    Spin(spin::Args),
    Mixed(mixed::Args),
    Pipeline(pipeline::Args),
    StreamServe(stream::ServeArgs),
    StreamSend(stream::SendArgs),
    StreamReceive(stream::ReceiveArgs),
    Transactions(transactions::Args),
}

fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::Facts => facts::Facts::of_container().print(),
        Command::Run(args) => run::run(&args),
        Command::Native(args) => native::run(&args),
        Command::Guest(args) => guest::run(&args),
        Command::Announce(args) => announce::run(&args),
        Command::Syscalls(args) => calls::syscalls(&args),
        Command::Alloc(args) => calls::alloc(&args),
        Command::Open(args) => calls::open(&args),
        Command::Frames(args) => frames::run(&args),
        Command::Spin(args) => spin::run(&args),
        Command::Mixed(args) => mixed::run(&args),
        Command::Pipeline(args) => pipeline::run(&args),
        Command::StreamServe(args) => stream::serve(&args),
        Command::StreamSend(args) => stream::send(&args),
        Command::StreamReceive(args) => stream::receive(&args),
        Command::Transactions(args) => transactions::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-helper: {error:#}");
            ExitCode::FAILURE
        }
    }
}
