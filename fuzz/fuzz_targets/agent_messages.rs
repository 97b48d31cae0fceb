//! Answers of an agent and requests of its kernel. What is read and written again reads the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use protobuf::Message;
use sandboxer::pod::container::stats;
use sandboxer_protocol::{
    agent::{
        ListContainersResponse, ListProcessesResponse, ListVolumesResponse,
        ReadConnectionResponse, ReadOutputResponse, StatsResponse, WaitProcessResponse, WriteInputResponse,
    },
    share::Head,
};

fn again<M: Message + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<M> {
    let message = M::parse_from_bytes(bytes).ok()?;
    let written = message.write_to_bytes().expect("what was read can be written");
    assert_eq!(M::parse_from_bytes(&written).ok().as_ref(), Some(&message));
    Some(message)
}

fuzz_target!(|bytes: &[u8]| {
    again::<ReadOutputResponse>(bytes);
    again::<ReadConnectionResponse>(bytes);
    again::<WaitProcessResponse>(bytes);
    again::<WriteInputResponse>(bytes);
    again::<ListContainersResponse>(bytes);
    again::<ListProcessesResponse>(bytes);
    again::<ListVolumesResponse>(bytes);
    if let Some(readings) = again::<StatsResponse>(bytes) {
        stats::encode(&readings).expect("any numbers are metrics");
    }
    if let Some(head) = Head::parse(bytes) {
        assert!(head.is_answered_by(&head.failed(5)));
    }
    sandboxer_guest::bounds::plain(&String::from_utf8_lossy(bytes));
});
