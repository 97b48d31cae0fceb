//! What a guest sends after its greeting. However the stream is cut, the verdict is the same, and an answer to
//! nothing is never let through.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandboxer_guest::bounds::Follow;

fuzz_target!(|input: (Vec<u8>, Vec<u8>, u8)| {
    let (asked, said, piece) = input;
    let mut whole = Follow::default();
    let verdict = whole.sent(&asked).and_then(|()| whole.received(&said));

    let mut pieces = Follow::default();
    let piece = usize::from(piece).max(1);
    let asking = asked.chunks(piece).try_for_each(|bytes| pieces.sent(bytes));
    assert_eq!(asking.and_then(|()| said.chunks(piece).try_for_each(|bytes| pieces.received(bytes))), verdict);

    // A whole header of an answer without a caller.
    if asked.is_empty() && said.len() >= 10 {
        assert!(verdict.is_err());
    }
});
