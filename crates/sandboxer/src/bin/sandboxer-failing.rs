//! `sandboxer` with its failure points, for the tests that kill it at each of them.

#[path = "../main.rs"]
mod worker;

fn main() -> std::process::ExitCode {
    worker::main()
}
