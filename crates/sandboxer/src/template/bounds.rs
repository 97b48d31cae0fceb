//! Selects the templates to remove so that the rest keeps within the bounds: a pure function.

use std::time::SystemTime;

use sandboxer_config::TemplateConfig;

use super::TemplateKey;

/// A template on disk: the properties that matter for the bounds.
#[derive(Debug, Clone)]
pub struct StoredTemplate {
    /// The name of the template.
    pub key: TemplateKey,
    /// Time of the template's last use.
    pub used: SystemTime,
    /// Size of the template's files on disk, bytes.
    pub bytes: u64,
    /// Whether the template must not be removed.
    pub spared: bool,
}

/// Returns the templates to remove, the least recently used first, so that the rest keeps within `bounds`, together
/// with a new one of `further` bytes if one is to be built. `None`: the templates that must stay leave no space.
pub fn doomed(
    mut all: Vec<StoredTemplate>,
    further: Option<u64>,
    bounds: &TemplateConfig,
) -> Option<Vec<TemplateKey>> {
    all.sort_by(|a, b| (a.used, &a.key).cmp(&(b.used, &b.key)));
    let mut count = all.len() + usize::from(further.is_some());
    let mut bytes = all.iter().map(|template| template.bytes).chain(further).fold(0, u64::saturating_add);
    let mut doomed = Vec::new();
    let mut spare = all.into_iter().filter(|template| !template.spared);
    while count > bounds.most || bytes > bounds.most_bytes {
        let next = spare.next()?;
        count -= 1;
        bytes = bytes.saturating_sub(next.bytes);
        doomed.push(next.key);
    }
    Some(doomed)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn key(n: usize) -> TemplateKey {
        TemplateKey::parse(&format!("{n:032x}")).unwrap()
    }

    fn bounds(most: usize, most_bytes: u64) -> TemplateConfig {
        TemplateConfig { enabled: true, most, most_bytes }
    }

    /// Returns templates in the order of use, the least recently used first.
    fn stored(sizes: &[(u64, bool)]) -> Vec<StoredTemplate> {
        let at = |n: usize| SystemTime::UNIX_EPOCH + Duration::from_secs(n as u64);
        let template = |(n, &(bytes, spared)): (usize, &(u64, bool))| StoredTemplate {
            key: key(n),
            used: at(n),
            bytes,
            spared,
        };
        sizes.iter().enumerate().map(template).collect()
    }

    #[test]
    fn the_least_recently_used_go_and_those_in_use_stay() {
        let all = stored(&[(10, false), (10, true), (10, false), (10, true)]);
        assert_eq!(doomed(all.clone(), None, &bounds(4, 40)), Some(vec![]));
        assert_eq!(doomed(all.clone(), Some(0), &bounds(4, 40)), Some(vec![key(0)]));
        assert_eq!(doomed(all.clone(), None, &bounds(4, 25)), Some(vec![key(0), key(2)]));
        assert_eq!(doomed(all.clone(), Some(1), &bounds(4, 20)), None);
        assert_eq!(doomed(all, Some(0), &bounds(2, 40)), None);
    }

    proptest! {
        #[test]
        fn what_is_left_keeps_within_the_bounds_and_nothing_goes_in_vain(
            all in prop::collection::vec((0_u64..100, any::<bool>()), 0..8),
            further in prop::option::of(0_u64..100), most in 1_usize..8, most_bytes in 1_u64..400,
        ) {
            let fits = |removed: &[TemplateKey]| {
                let left: Vec<StoredTemplate> = stored(&all).into_iter().filter(|template| !removed.contains(&template.key)).collect();
                left.len() + usize::from(further.is_some()) <= most
                    && left.iter().map(|template| template.bytes).chain(further).sum::<u64>() <= most_bytes
            };
            let spare: Vec<TemplateKey> =
                stored(&all).into_iter().filter(|template| !template.spared).map(|template| template.key).collect();
            match doomed(stored(&all), further, &bounds(most, most_bytes)) {
                Some(removed) => {
                    prop_assert!(fits(&removed));
                    prop_assert!(spare.starts_with(&removed));
                    prop_assert!(removed.split_last().is_none_or(|(_, fewer)| !fits(fewer)));
                }
                None => prop_assert!(!fits(&spare)),
            }
        }
    }
}
