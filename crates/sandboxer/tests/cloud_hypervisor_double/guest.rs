//! The guest of a double: answers on its vsock what `test_guest/init.sh` answers on its port, one line per
//! line, and prints to the console.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::Arc,
    thread,
};

use super::machine::Machine;
