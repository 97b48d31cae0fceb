//! Requests of a guest's kernel to the server of its shares. Whatever is in them, a name goes one step down.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandboxer_share::wire::{Name, Request, node};

fn goes_down(name: Name<'_>) {
    let name = name.as_c_str().to_bytes();
    assert!(!matches!(name, b"" | b"." | b"..") && !name.contains(&b'/'), "{name:?}");
}

fuzz_target!(|bytes: &[u8]| {
    node(bytes);
    match Request::parse(bytes) {
        Ok(
            Request::Lookup { name }
            | Request::MakeLink { name, .. }
            | Request::MakeNode { name, .. }
            | Request::MakeDirectory { name, .. }
            | Request::Remove { name, .. }
            | Request::Link { name, .. }
            | Request::Create { name, .. },
        ) => goes_down(name),
        Ok(Request::Rename { name, new, .. }) => [name, new].into_iter().for_each(goes_down),
        _ => {}
    }
});
