//! `sandboxer` with its points of failure, for the tests that have it killed at each of them.

#[path = "../main.rs"]
mod worker;

fn main() -> std::process::ExitCode {
    worker::main()
}
