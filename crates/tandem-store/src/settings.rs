//! Where things are: everything the environment decides, read once and in one place.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::aliases::{ALIASES, Alias};
use crate::{Result, StoreError};

/// All that a [`Store`](crate::Store) depends on outside itself.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The store's folder. Created when something is first put into it.
    pub root: PathBuf,
    /// The aliases there are.
    pub aliases: &'static [Alias],
    /// Python executables to look for pip in, in order of preference.
    pub pythons: Vec<OsString>,
    /// The Hugging Face hub and its cache.
    pub hub: HubSettings,
}

/// The Hugging Face hub and its cache on this machine.
#[derive(Clone)]
pub struct HubSettings {
    /// Base address, without a slash at the end.
    pub endpoint: String,
    /// The folder with one `models--owner--name` folder a repository.
    pub cache: PathBuf,
    /// Access token.
    pub token: Option<String>,
    /// Never touch the network.
    pub offline: bool,
}

/// The token stays out of logs.
impl std::fmt::Debug for HubSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { endpoint, cache, token, offline } = self;
        f.debug_struct("HubSettings")
            .field("endpoint", endpoint)
            .field("cache", cache)
            .field("token", &token.as_ref().map(|_| "..."))
            .field("offline", offline)
            .finish()
    }
}

impl Settings {
    /// The settings of this process's environment. `root` wins over TANDEM_HOME, which wins over the platform's
    /// folder for application data.
    pub fn from_env(root: Option<PathBuf>) -> Result<Self> {
        Self::from_vars(root, &|name| std::env::var_os(name))
    }

    fn from_vars(root: Option<PathBuf>, var: &dyn Fn(&str) -> Option<OsString>) -> Result<Self> {
        let var = |name: &str| var(name).filter(|value| !value.is_empty());
        let path = |name: &str| var(name).map(PathBuf::from);
        let home = || path("HOME").or_else(|| path("USERPROFILE")).ok_or(StoreError::NoHome);

        let root = match root.or_else(|| path("TANDEM_HOME")) {
            Some(root) => root,
            None if cfg!(target_os = "macos") => home()?.join("Library/Application Support/tandem"),
            None => match path("XDG_DATA_HOME").or_else(|| path("LOCALAPPDATA")) {
                Some(data) => data.join("tandem"),
                None => home()?.join(".local/share/tandem"),
            },
        };

        // The names and their order are those of Python's huggingface_hub.
        let hf_home = match path("HF_HOME") {
            Some(home) => home,
            None => match path("XDG_CACHE_HOME") {
                Some(cache) => cache.join("huggingface"),
                None => home()?.join(".cache/huggingface"),
            },
        };
        let text = |name: &str| var(name).and_then(|value| value.into_string().ok());
        let token = text("HF_TOKEN").or_else(|| {
            std::fs::read_to_string(path("HF_TOKEN_PATH").unwrap_or_else(|| hf_home.join("token"))).ok()
        });
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let hub = HubSettings {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache: path("HF_HUB_CACHE").unwrap_or_else(|| hf_home.join("hub")),
            token: token.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()),
            offline: text("HF_HUB_OFFLINE")
                .is_some_and(|v| ["1", "on", "yes", "true"].contains(&v.to_lowercase().as_str())),
        };
        Ok(Self { root, aliases: ALIASES, pythons: vec!["python3".into(), "python".into()], hub })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(root: Option<&str>, vars: &[(&str, &str)]) -> Result<Settings> {
        let vars: std::collections::HashMap<String, String> =
            vars.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Settings::from_vars(root.map(PathBuf::from), &|name| vars.get(name).map(OsString::from))
    }

    #[test]
    fn the_argument_wins_over_the_environment_over_the_platform() {
        let vars = [("HOME", "/h"), ("TANDEM_HOME", "/t"), ("XDG_DATA_HOME", "/x")];
        assert_eq!(with(Some("/arg"), &vars).unwrap().root, PathBuf::from("/arg"));
        assert_eq!(with(None, &vars).unwrap().root, PathBuf::from("/t"));
        if !cfg!(target_os = "macos") {
            assert_eq!(with(None, &[("HOME", "/h"), vars[2]]).unwrap().root, PathBuf::from("/x/tandem"));
            let plain = with(None, &[("HOME", "/h"), ("TANDEM_HOME", "")]).unwrap();
            assert_eq!(plain.root, PathBuf::from("/h/.local/share/tandem"));
        }
        assert!(matches!(with(None, &[]), Err(StoreError::NoHome)));
    }

    #[test]
    fn the_hubs_own_variables_are_honoured() {
        let hub = with(None, &[("HOME", "/h")]).unwrap().hub;
        assert_eq!(hub.cache, PathBuf::from("/h/.cache/huggingface/hub"));
        assert_eq!((hub.token, hub.offline), (None, false));
        let hub = with(
            None,
            &[
                ("HOME", "/h"),
                ("HF_HOME", "/hf"),
                ("HF_TOKEN", " secret\n"),
                ("HF_ENDPOINT", "http://mirror/"),
                ("HF_HUB_OFFLINE", "1"),
            ],
        )
        .unwrap()
        .hub;
        assert_eq!(hub.cache, PathBuf::from("/hf/hub"));
        assert_eq!(hub.endpoint, "http://mirror");
        assert!(hub.offline);
        assert_eq!(hub.token.as_deref(), Some("secret"));
        assert!(!format!("{hub:?}").contains("secret"));
        let hub = with(None, &[("HOME", "/h"), ("HF_HUB_CACHE", "/c")]).unwrap().hub;
        assert_eq!(hub.cache, PathBuf::from("/c"));
    }
}
