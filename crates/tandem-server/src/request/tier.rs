//! `service_tier`: which of the requests that wait comes first.

use crate::ApiError;
use crate::fields::Fields;

/// A tier, by OpenAI's names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Tier {
    /// After all others.
    Flex,
    /// In its turn.
    #[default]
    Default,
    /// Before all others.
    Priority,
}

impl Tier {
    /// What the scheduler goes by.
    pub fn priority(self) -> i8 {
        match self {
            Self::Flex => -1,
            Self::Default => 0,
            Self::Priority => 1,
        }
    }

    /// What an answer says.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Default => "default",
            Self::Priority => "priority",
        }
    }

    /// `None` where the request says nothing.
    pub(super) fn take(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let tier = |name: String| match name.as_str() {
            "flex" => Ok(Self::Flex),
            "auto" | "default" => Ok(Self::Default),
            "priority" => Ok(Self::Priority),
            _ => {
                let message = "`service_tier` must be \"auto\", \"default\", \"flex\" or \"priority\"";
                Err(ApiError::field("service_tier", message))
            }
        };
        fields.string("service_tier")?.map(tier).transpose()
    }
}
