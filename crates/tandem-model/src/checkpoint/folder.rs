//! A checkpoint as Hugging Face folders hold it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::mlx::{Packed, Quantization};
use super::{Checkpoint, verify};
use crate::arch::{self, Architecture};
use crate::chat::ChatTemplate;
use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::generation::{GenerationConfig, token_ids};
use crate::safetensors;
use crate::tokenizer::Tokenizer;
use crate::weights::{Bytes, MappedFile, Source, Tensor, Weights};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const AGAIN: &str = "download the checkpoint again";

pub(super) fn open(folder: &Path) -> Result<Checkpoint, ModelError> {
    let (decoder, weights) = network(folder)?;
    let settings = TokenizerSettings::read(folder)?;
    let tokenizer_path = folder.join("tokenizer.json");
    let tokenizer_json = read(&tokenizer_path)?.ok_or_else(|| missing_tokenizer(folder))?;
    let tokenizer = Tokenizer::from_json(&tokenizer_path, &tokenizer_json, decoder.vocab_size)?
        .with_ends(settings.special.get("bos_token"), settings.special.get("eos_token"));
    let mut generation = generation(folder, &settings, &tokenizer)?;
    let chat = settings.chat(folder)?;
    if let Some(template) = chat.as_ref().and_then(|chat| chat.source(false).ok()) {
        generation.add_turn_ends(&tokenizer, template);
    }
    Ok(Checkpoint { decoder, weights, tokenizer, chat, generation, source: folder.to_owned() })
}

/// config.json and the weights, checked against each other.
pub(super) fn network(folder: &Path) -> Result<(Decoder, Arc<Weights>), ModelError> {
    let config_path = folder.join(CONFIG);
    let config_json = read(&config_path)?.ok_or_else(|| missing_config(folder))?;
    let (architecture, decoder) = arch::decoder_from_config(&config_path, &config_json)?;
    let quantization = Quantization::read(&Config::parse(&config_path, &config_json)?, architecture)?;
    let Stored { mut tensors, packed } = stored(folder, architecture, quantization.is_some())?;
    if let Some(quantization) = quantization {
        quantization.join(&config_path, packed, &mut tensors)?;
    }
    drop_redundant_head(folder, &decoder, &mut tensors)?;
    let weights = Weights::new(tensors);
    verify(&decoder, &weights, architecture)?;
    Ok((decoder, Arc::new(weights)))
}

/// A file's bytes, or `None` if it is not there.
fn read(path: &Path) -> Result<Option<Vec<u8>>, ModelError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ModelError::Io { path: path.to_owned(), source }),
    }
}

fn missing_config(folder: &Path) -> ModelError {
    let gguf = files_ending(folder, ".gguf");
    let hint = if let Some(name) = gguf.first() {
        format!("the folder holds {name}; give that file")
    } else if folder.join("adapter_config.json").exists() {
        "this is a LoRA adapter; give the folder of the model it was trained on".to_owned()
    } else {
        "give the folder that config.json and the .safetensors files are in, or a .gguf file".to_owned()
    };
    ModelError::missing_file(folder.join(CONFIG), "it says what the model is", hint)
}

fn missing_tokenizer(folder: &Path) -> ModelError {
    let hint = if folder.join("tokenizer.model").exists() {
        "the folder holds tokenizer.model; convert it with transformers: \
         AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    } else {
        "copy tokenizer.json from the model that this one was made from"
    };
    ModelError::missing_file(folder.join("tokenizer.json"), "it turns text into tokens", hint)
}

/// Names in the folder that end in `ending`, in order.
fn files_ending(folder: &Path, ending: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(ending)).collect();
    names.sort();
    names
}

/// What the files hold.
#[derive(Default)]
struct Stored {
    tensors: BTreeMap<String, Tensor>,
    /// The u32 tensors of a folder that MLX quantized.
    packed: BTreeMap<String, Packed>,
}

/// The tensors of one file or of all shards that the index names.
fn stored(folder: &Path, architecture: &Architecture, quantized: bool) -> Result<Stored, ModelError> {
    let mut stored = Stored::default();
    let single = folder.join(SINGLE);
    if single.exists() {
        stored.add_file(&single, architecture, quantized)?;
        return Ok(stored);
    }
    let index_path = folder.join(INDEX);
    let Some(json) = read(&index_path)? else { return Err(missing_weights(folder)) };
    let index = safetensors::parse_index(&index_path, &json)?;
    for shard in index.values().collect::<BTreeSet<_>>() {
        let path = folder.join(shard);
        if !path.exists() {
            let what = format!("{INDEX} names it");
            return Err(ModelError::missing_file(path, what, AGAIN));
        }
        stored.add_file(&path, architecture, quantized)?;
    }
    for (name, shard) in &index {
        let known = architecture.known_name(name.clone());
        if !stored.contains(&known) && !architecture.tolerates(&known) {
            let what = format!("tensor {name} should be in {shard}, but is not there");
            return Err(ModelError::malformed(&index_path, what, AGAIN));
        }
    }
    Ok(stored)
}

fn missing_weights(folder: &Path) -> ModelError {
    let pickles = [".bin", ".pth", ".pt"].iter().flat_map(|ending| files_ending(folder, ending)).next();
    let hint = match (pickles, files_ending(folder, ".safetensors").first()) {
        (Some(name), _) => format!(
            "the folder holds only {name}, a pickle that Tandem does not run; convert it with transformers: \
             AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ),
        (None, Some(name)) => format!("the folder holds {name} under a name that no index explains; {AGAIN}"),
        (None, None) => AGAIN.to_owned(),
    };
    ModelError::missing_file(folder.join(SINGLE), "it holds the weights", hint)
}

impl Stored {
    fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.packed.contains_key(name)
    }

    fn add_file(
        &mut self,
        path: &Path,
        architecture: &Architecture,
        quantized: bool,
    ) -> Result<(), ModelError> {
        let file = MappedFile::open(path)?;
        for entry in safetensors::parse(path, file.bytes())? {
            let name = architecture.known_name(entry.name.clone());
            if self.contains(&name) {
                let what =
                    format!("tensor {} is in another shard too, or there under another name", entry.name);
                return Err(ModelError::malformed(path, what, AGAIN));
            }
            let format = entry.format();
            let bytes = Bytes { source: Source::Mapped(file.clone()), range: entry.range };
            if let Some(format) = format {
                let tensor = Tensor { format, shape: entry.shape, values: bytes, groups: None };
                self.tensors.insert(name, tensor);
            } else if architecture.tolerates(&name) {
                continue;
            } else if quantized && entry.dtype == "U32" {
                self.packed.insert(name, Packed { shape: entry.shape, bytes });
            } else {
                return Err(ModelError::unsupported(
                    path,
                    format!("type of tensor {}", entry.name),
                    entry.dtype,
                    "Tandem reads F32, F16 and BF16, and U32 where config.json has MLX's `quantization`; convert the \
                     model to one of these",
                ));
            }
        }
        Ok(())
    }
}

/// A tied checkpoint may store its head all the same. Equal bytes are redundant; others would silently be ignored.
fn drop_redundant_head(
    folder: &Path,
    decoder: &Decoder,
    tensors: &mut BTreeMap<String, Tensor>,
) -> Result<(), ModelError> {
    const HEAD: &str = "lm_head.weight";
    let embedding = &decoder.embedding.tensor;
    if decoder.head.weight.tensor != *embedding {
        return Ok(());
    }
    let (Some(head), Some(embedding)) = (tensors.get(HEAD), tensors.get(embedding)) else { return Ok(()) };
    if !head.parts().map(Bytes::as_slice).eq(embedding.parts().map(Bytes::as_slice)) {
        return Err(ModelError::unsupported(
            &folder.join(CONFIG),
            "tie_word_embeddings",
            "true",
            format!(
                "the checkpoint has a {HEAD} that differs from the embedding; set the key to false to use it"
            ),
        ));
    }
    tensors.remove(HEAD);
    Ok(())
}

/// generation_config.json, with the end tokens of config.json or tokenizer_config.json where it names none.
fn generation(
    folder: &Path,
    settings: &TokenizerSettings,
    tokenizer: &Tokenizer,
) -> Result<GenerationConfig, ModelError> {
    let path = folder.join("generation_config.json");
    let mut generation = match read(&path)? {
        Some(json) => GenerationConfig::read(&Config::parse(&path, &json)?)?,
        None => GenerationConfig::default(),
    };
    let config_path = folder.join(CONFIG);
    if generation.eos_token_ids.is_empty()
        && let Some(json) = read(&config_path)?
    {
        generation.add_eos(token_ids(&Config::parse(&config_path, &json)?, "eos_token_id")?);
    }
    if generation.eos_token_ids.is_empty() {
        generation.add_eos(settings.special.get("eos_token").and_then(|text| tokenizer.id_of(text)));
    }
    if !generation.not_read.is_empty() {
        tracing::warn!(keys = ?generation.not_read, "generation_config.json asks for what Tandem does not do");
    }
    Ok(generation)
}

/// tokenizer_config.json and special_tokens_map.json: the texts of special tokens, and templates.
struct TokenizerSettings {
    special: BTreeMap<String, String>,
    /// A string, or a list of `{name, template}`.
    chat_template: Value,
}

impl TokenizerSettings {
    fn read(folder: &Path) -> Result<Self, ModelError> {
        let object = |name: &str| -> Result<Map<String, Value>, ModelError> {
            let path = folder.join(name);
            let Some(json) = read(&path)? else { return Ok(Map::new()) };
            serde_json::from_slice(&json)
                .map_err(|error| ModelError::malformed(&path, format!("not a JSON object: {error}"), AGAIN))
        };
        let mut config = object("tokenizer_config.json")?;
        let mut special = BTreeMap::new();
        for map in [&object("special_tokens_map.json")?, &config] {
            for (key, value) in map.iter().filter(|(key, _)| key.ends_with("_token")) {
                // A token is its text, or an object with flags.
                if let Some(text) = value.as_str().or_else(|| value["content"].as_str()) {
                    special.insert(key.clone(), text.to_owned());
                }
            }
        }
        let mut chat_template = config.remove("chat_template").unwrap_or_default();
        if let Some(template) = object("chat_template.json")?.remove("chat_template") {
            chat_template = template;
        }
        Ok(Self { special, chat_template })
    }

    /// The templates; a file of their own wins, as in transformers.
    fn chat(self, folder: &Path) -> Result<Option<ChatTemplate>, ModelError> {
        let text = |path: &Path| -> Result<Option<String>, ModelError> {
            let Some(bytes) = read(path)? else { return Ok(None) };
            let text = String::from_utf8(bytes);
            text.map(Some).map_err(|_| ModelError::malformed(path, "the template is not UTF-8", AGAIN))
        };
        let mut named = BTreeMap::new();
        match self.chat_template {
            Value::String(source) => {
                named.insert("default".to_owned(), source);
            }
            Value::Array(list) => {
                for entry in list {
                    if let (Some(name), Some(source)) = (entry["name"].as_str(), entry["template"].as_str()) {
                        named.insert(name.to_owned(), source.to_owned());
                    }
                }
            }
            _ => {}
        }
        if let Some(source) = text(&folder.join("chat_template.jinja"))? {
            named.clear();
            named.insert("default".to_owned(), source);
        }
        let more = folder.join("additional_chat_templates");
        for file in files_ending(&more, ".jinja") {
            if let Some(source) = text(&more.join(&file))? {
                named.insert(file.trim_end_matches(".jinja").to_owned(), source);
            }
        }
        Ok((!named.is_empty()).then(|| ChatTemplate::with_named(named, self.special)))
    }
}
