//! What agents of the oldest version in [`SPOKEN`](crate::SPOKEN) do not know.
//!
//! A guest keeps the agent with which it was started, so the daemon talks to agents of the release before, and those
//! ignore what they do not know. Every part of the protocol that came after the oldest version is therefore in
//! [`NEWER`], with its version. The daemon's client refuses to send such a part to an older agent, by name. Whoever makes
//! a message asks `Agent::knows` first, where a pod can do without the part.
//!
//! `proto/agent.oldest` lists the parts of the oldest version. A test compares both with `agent.proto`: a part that is in
//! neither fails it. When a version is no longer spoken, its parts move from [`NEWER`] to that file, as the test prints
//! them. A mount's source below [`GUEST`] that is not in [`SOURCES`] is new to every agent before today's.

use std::path::{Path, PathBuf};

use protobuf::{
    MessageDyn,
    reflect::{ReflectFieldRef, ReflectValueRef},
};
use serde::Deserialize;

use crate::{IMAGE_VOLUME, VOLUMES_DIR, agent::CreateContainerRequest, share::GUEST_DIR};

/// A part of the protocol that came after the oldest version.
#[derive(Debug, PartialEq, Eq)]
pub struct Newer {
    /// `Message.field` or `rpc Call` in `agent.proto`, or a mount's source.
    pub part: &'static str,
    /// The first version whose agents know it.
    pub since: u32,
    /// What a pod has by it, in words for an administrator.
    pub what: &'static str,
}

/// The node's sysctls that a pod's guest gets.
pub const HOST_SYSCTLS: Newer =
    Newer { part: "ConfigurePodRequest.host_sysctls", since: 7, what: "the node's sysctls" };
/// The removal of network cards that a pod does not have.
pub const REMOVES_OTHER_CARDS: Newer = Newer {
    part: "ConfigurePodRequest.removes_other_cards",
    since: 7,
    what: "the removal of a spare network card",
};
/// A limit of a pod's processes.
pub const PROCESSES: Newer =
    Newer { part: "PodLimits.processes", since: 7, what: "a limit of the pod's processes" };
/// The volumes of an image on the container's own disk.
pub const IMAGE_VOLUMES: Newer =
    Newer { part: IMAGE_VOLUME, since: 7, what: "volumes of an image on the container's disk" };

/// A root file system that containers and the host share.
pub const SHARED_ROOT: Newer =
    Newer { part: "Rootfs.share", since: 7, what: "root file systems that their callers mount" };

/// A name server of the host for a guest's programs.
pub const TAKE_QUERY: Newer = Newer { part: "rpc TakeQuery", since: 7, what: NAMES };
const ANSWER_QUERY: Newer = Newer { part: "rpc AnswerQuery", since: 7, what: NAMES };
const NAMES: &str = "names of docker's networks";
const NAMES_PARTS: [Newer; 5] = [
    Newer { part: "TakeQueryRequest.address", since: 7, what: NAMES },
    Newer { part: "TakeQueryResponse.query", since: 7, what: NAMES },
    Newer { part: "TakeQueryResponse.data", since: 7, what: NAMES },
    Newer { part: "AnswerQueryRequest.query", since: 7, what: NAMES },
    Newer { part: "AnswerQueryRequest.data", since: 7, what: NAMES },
];

/// The adoption of a container by a copy of its guest.
pub const ADOPTION: Newer = of_adoption("rpc AdoptContainer");

/// All of them.
pub const NEWER: [&Newer; 18] = [
    &HOST_SYSCTLS,
    &REMOVES_OTHER_CARDS,
    &PROCESSES,
    &IMAGE_VOLUMES,
    &SHARED_ROOT,
    &TAKE_QUERY,
    &ANSWER_QUERY,
    &NAMES_PARTS[0],
    &NAMES_PARTS[1],
    &NAMES_PARTS[2],
    &NAMES_PARTS[3],
    &NAMES_PARTS[4],
    &ADOPTION,
    &of_adoption("AdoptContainerRequest.container_id"),
    &of_adoption("AdoptContainerRequest.of"),
    &of_adoption("AdoptContainerRequest.files"),
    &of_adoption("AdoptContainerRequest.signal"),
    &of_adoption("AdoptContainerResponse.pid"),
];

const fn of_adoption(part: &'static str) -> Newer {
    Newer { part, since: 7, what: "containers that go on in a copy of their pod" }
}

/// The directory below which a mount's source means something to an agent.
const GUEST: &str = "/run/sandboxer";

/// What a mount's source below [`GUEST`] may be, and `None` if the oldest version knows it.
const SOURCES: [(&str, Option<&Newer>); 3] =
    [(VOLUMES_DIR, None), (GUEST_DIR, None), (IMAGE_VOLUME, Some(&IMAGE_VOLUMES))];

/// A mount of a kind that is in no list.
const UNLISTED: Newer = Newer { part: GUEST, since: u32::MAX, what: "a mount of a kind that is not listed" };

/// Returns the first part of a message, or of the container's specification in it, that agents of `version` do not know.
pub fn in_message(message: &dyn MessageDyn, version: u32) -> Option<&'static Newer> {
    if let Some(request) = message.downcast_ref::<CreateContainerRequest>()
        && let Some(newer) = in_spec(&request.spec_json, version)
    {
        return Some(newer);
    }
    let descriptor = message.descriptor_dyn();
    let nested = |value: ReflectValueRef<'_>| match value {
        ReflectValueRef::Message(message) => in_message(&*message, version),
        _ => None,
    };
    descriptor.fields().find_map(|field| {
        let (values, is_set) = match field.get_reflect(message) {
            ReflectFieldRef::Optional(value) => {
                (value.value().into_iter().collect(), field.has_field(message))
            }
            ReflectFieldRef::Repeated(values) => {
                let is_set = !values.is_empty();
                (values.into_iter().collect(), is_set)
            }
            // No map of the protocol has messages.
            ReflectFieldRef::Map(values) => (Vec::new(), !values.is_empty()),
        };
        let is_newer = |newer: &&&Newer| {
            let (message, name) = newer.part.split_once('.').unwrap_or_default();
            newer.since > version && message == descriptor.name() && name == field.name()
        };
        let newer = NEWER.iter().find(is_newer).copied();
        if is_set { newer.or_else(|| values.into_iter().find_map(nested)) } else { None }
    })
}

/// Returns the first mount of a container's specification that agents of `version` do not know. They refuse what is no
/// specification.
fn in_spec(json: &[u8], version: u32) -> Option<&'static Newer> {
    #[derive(Deserialize)]
    struct Spec {
        #[serde(default)]
        mounts: Vec<Mount>,
    }
    #[derive(Deserialize)]
    struct Mount {
        source: Option<PathBuf>,
    }
    let spec: Spec = serde_json::from_slice(json).ok()?;
    spec.mounts
        .iter()
        .filter_map(|mount| mount.source.as_deref())
        .find_map(|source| in_source(source, version))
}

/// Returns what it is about a mount's source that agents of `version` do not know.
pub fn in_source(source: &Path, version: u32) -> Option<&'static Newer> {
    if !source.starts_with(GUEST) {
        return None;
    }
    let newer = match SOURCES.iter().find(|(dir, _)| source.starts_with(dir)) {
        Some((_, newer)) => (*newer)?,
        None => &UNLISTED,
    };
    (newer.since > version).then_some(newer)
}

/// Returns in words what pods lack whose agents speak `version`.
pub fn lacked_by(version: u32) -> String {
    let mut lacked: Vec<_> =
        NEWER.iter().filter(|newer| newer.since > version).map(|newer| newer.what).collect();
    // Parts that belong together are beside each other.
    lacked.dedup();
    lacked.join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use protobuf::{Message, MessageFull, reflect::MessageDescriptor};

    use super::*;
    use crate::{
        PROTOCOL_VERSION, SPOKEN,
        agent::{ConfigurePodRequest, PodLimits, UpdatePodRequest},
    };

    /// Lists a message's fields and those of the messages in it.
    fn list(message: &MessageDescriptor, parts: &mut BTreeSet<String>) {
        for field in message.fields() {
            let kind = match field.proto().type_name() {
                "" => format!("{:?}", field.proto().type_()),
                name => name.rsplit('.').next().unwrap_or_default().to_owned(),
            };
            let repeated = if field.is_repeated_or_map() { " repeated" } else { "" };
            parts.insert(format!(
                "{}.{} = {} {kind}{repeated}",
                message.name(),
                field.name(),
                field.number()
            ));
        }
        let nested = message.nested_messages().filter(|nested| !nested.proto().options.map_entry());
        nested.for_each(|nested| list(&nested, parts));
    }

    /// Lists the calls, and the fields of all messages, of today's protocol.
    fn parts() -> BTreeSet<String> {
        let file = ConfigurePodRequest::descriptor().file_descriptor().clone();
        let mut parts = BTreeSet::new();
        file.messages().for_each(|message| list(&message, &mut parts));
        for service in &file.proto().service {
            parts.extend(service.method.iter().map(|call| format!("rpc {}", call.name())));
        }
        for kind in &file.proto().enum_type {
            parts.extend(kind.value.iter().map(|value| format!("{} {}", kind.name(), value.name())));
        }
        parts
    }

    #[test]
    fn each_part_of_the_protocol_is_of_the_oldest_version_or_says_since_when_it_is_there() {
        let oldest: BTreeSet<_> = include_str!("../proto/agent.oldest").lines().map(str::to_owned).collect();
        let today = parts();
        let is_listed = |part: &&String| {
            let name = part.split(" = ").next().unwrap_or_default();
            oldest.contains(*part) || NEWER.iter().any(|newer| newer.part == name)
        };
        let unlisted: Vec<_> = today.iter().filter(|part| !is_listed(part)).collect();
        assert!(
            unlisted.is_empty(),
            "agents of version {} do not know these; list them in NEWER with the version that does, raise \
             PROTOCOL_VERSION if it has been released, and do without them where an agent is older: {unlisted:#?}",
            SPOKEN.start()
        );
        let removed: Vec<_> = oldest.difference(&today).collect();
        assert!(removed.is_empty(), "agents of version {} still use these: {removed:#?}", SPOKEN.start());
        for newer in NEWER {
            let known = |part: &String| part.split(" = ").next() == Some(newer.part);
            assert!(!oldest.iter().any(known), "{newer:?} is in the oldest version");
            assert!(today.iter().any(known) || newer.part.starts_with(GUEST), "{newer:?} is nowhere");
            assert!(
                newer.since > *SPOKEN.start() && newer.since <= PROTOCOL_VERSION,
                "{newer:?} belongs to no version that is spoken"
            );
        }
    }

    #[test]
    fn a_newer_part_is_found_wherever_it_is_and_only_if_it_is_set() {
        let limits = |processes| PodLimits { processes, memory_bytes: 1, ..Default::default() };
        let configure = |limits| ConfigurePodRequest { limits: Some(limits).into(), ..Default::default() };
        let update = UpdatePodRequest { limits: Some(limits(9)).into(), ..Default::default() };
        assert_eq!(in_message(&update, 6), Some(&PROCESSES));
        assert_eq!(in_message(&update, 7), None);
        assert_eq!(in_message(&configure(limits(9)), 6), Some(&PROCESSES));
        assert_eq!(in_message(&configure(limits(0)), 6), None);
        let mut sysctls = configure(limits(0));
        sysctls.host_sysctls.insert("a".to_owned(), "b".to_owned());
        assert_eq!(in_message(&sysctls, 6), Some(&HOST_SYSCTLS));
        let cards = ConfigurePodRequest { removes_other_cards: true, ..configure(limits(0)) };
        assert_eq!(in_message(&cards, 6), Some(&REMOVES_OTHER_CARDS));
        assert_eq!(in_message(&cards, 7), None);
        assert_eq!(in_message(CreateContainerRequest::default_instance(), 6), None);
    }

    #[test]
    fn a_mount_of_an_unlisted_kind_is_new_to_every_agent() {
        let source = |path: &str, version| in_source(Path::new(path), version);
        assert_eq!(source("/run/sandboxer/volumes/a/b", 6), None);
        assert_eq!(source("/run/sandboxer/shares/0", 6), None);
        assert_eq!(source("/dev/shm", 6), None);
        assert_eq!(source(IMAGE_VOLUME, 6), Some(&IMAGE_VOLUMES));
        assert_eq!(source(IMAGE_VOLUME, 7), None);
        assert_eq!(source("/run/sandboxer/another", PROTOCOL_VERSION), Some(&UNLISTED));

        let create = |source: &str| CreateContainerRequest {
            spec_json: format!(
                r#"{{"mounts": [{{"destination": "/proc", "type": "proc"}},
                                {{"destination": "/data", "source": "{source}"}}]}}"#
            )
            .into_bytes(),
            ..Default::default()
        };
        assert_eq!(in_message(&create(IMAGE_VOLUME), 6), Some(&IMAGE_VOLUMES));
        assert_eq!(in_message(&create(IMAGE_VOLUME), 7), None);
        assert_eq!(in_message(&create("/run/sandboxer/volumes/a"), 6), None);
        assert_eq!(in_message(&create("\\"), 6), None);
    }

    #[test]
    fn what_older_agents_lack_is_told() {
        assert!(lacked_by(6).contains("a limit of the pod's processes, volumes of an image"));
        assert_eq!(lacked_by(PROTOCOL_VERSION), "");
    }
}
