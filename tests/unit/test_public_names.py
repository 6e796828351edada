"""What can be imported, and what importing does not do."""

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import speechbrain_rev

PACKAGE = Path(speechbrain_rev.__file__).parent

PUBLIC = {
    "catalog": {
        "ListedEncoder", "Training", "counted_peaks", "select",
    },
    "cli": {"ArgumentParser", "main", "run_script"},
    "compression": {
        "ActivationCompression", "Compressed", "DeviationBound", "FixedBound", "Form",
        "GradientBound", "LayerRecord", "RangeBound", "Reason", "Rule",
        "compress_activations", "decode", "encode", "stop_compressing",
    },
    "hparams": {
        "Composition", "OptimizerWarning", "compose", "parse_arguments", "placeholders", "plain_settings",
        "resolve", "settings_help", "top_level_keys",
    },
    "inference": {
        "Cohort", "EmbeddingArchive", "EmbeddingGraph", "EnrolledSpeaker",
        "FbankStatistics", "FolderResult", "GraphFile", "SpeakerEmbedder", "Threshold",
        "Thresholds", "Verification", "WaveformEncoder", "Windows",
        "embed_folder", "embed_into", "embed_share", "export_graph", "export_run",
        "read_cohort",
    },
    "lobes": {"InferenceEncoder", "SpeakerEncoder", "build_encoder", "inference_form"},
    "kernels": set(),
    "planner": {
        "Infeasible", "LiveBytes", "MemoryReport", "Plan", "Profile", "Step", "Sweep",
        "breakdown", "largest_batch", "live_bytes_peak", "plan", "plan_step", "profile",
        "remedies", "repeated_blocks", "step_of", "sweep",
    },
    "plots": {
        "EncoderPoint", "ErrorRates", "PartsBar", "corpus_histograms", "det_plot",
        "encoder_map", "memory_parts", "plan_map", "training_curves",
    },
    "optim": {
        "SGD", "Adam", "AdamW", "Lion", "build_optimizer", "state_bytes",
    },
    "reversible": {
        "AdditiveCoupling", "Mode", "Recompute", "ReversibleChain", "StreamError",
        "StreamWarning", "cudnn_flags", "recompute_blocks",
    },
    "scoring": {
        "MEASURES", "BootstrapRates", "DetCurve", "Measure", "Trials", "as_norm", "bootstrap",
        "cohort_statistics", "cosine", "cosine_trials", "det_curve", "eer", "interval",
        "measured", "measures_in", "min_dcf", "read_scores", "read_trials", "speaker_means",
        "subtract_mean", "write_scores",
    },
    "audio": {"AudioInfo", "audio_exists", "audio_info", "read_audio", "read_blocks"},
    "data": {
        "ChunkBatch", "ChunkDataset", "EpochBatchSampler", "Format", "FORMATS",
        "GlobalRandomState", "LAYOUTS", "Layout", "Manifest", "Row", "Source",
        "SpeakerAugment", "Utterance", "WholeUtterances", "add_noise", "audio_files",
        "collate_chunks", "collate_whole", "generator", "open_sources", "read_manifest",
        "repeat_to", "reverberate", "write_manifest",
    },
    "training": {
        "CheckedSteps", "EpochLog", "MemoryBudget", "Tally", "ValidatedEpochs",
        "check_logger", "dry_run", "give_modes",
    },
}  # fmt: skip
#: Modules that are public by themselves.
MODULES = {
    "architectures": {
        "ARCHITECTURES",
        "ENCODERS",
        "WESPEAKER_ARCHITECTURES",
        "Architecture",
        "architecture",
        "counterparts",
    },
    "catalog.plans": {"plan_encoders", "sweep_encoder"},
    "catalog.steps": {"encoder_step"},
    "environment": {"environment"},
    "inference.wespeaker": {
        "convert_from_wespeaker",
        "convert_to_wespeaker",
        "from_wespeaker",
        "to_wespeaker",
    },
    "lobes.checkpointer": {
        "WholeCheckpointer",
        "average_of_last_epochs",
        "verify_checkpoint",
    },
    "lobes.classifier": {
        "AAMSoftmax",
        "AMSoftmax",
        "CosineClassifier",
        "build_classifier",
        "build_loss",
    },
    "lobes.pretrained": {"ModelPretrainer"},
    "lobes.schedules": {"SpeakerSchedule"},
    "training.memory_plan": {"plan_for_run"},
    "training.recipe_step": {"TrainingStep"},
}


def test_every_package_exports_its_public_names_and_no_others():
    packages = {m.name for m in pkgutil.iter_modules([str(PACKAGE)]) if m.ispkg}
    assert packages == set(PUBLIC)
    for name, names in PUBLIC.items():
        module = importlib.import_module(f"speechbrain_rev.{name}")
        exported = getattr(module, "__all__", [])
        assert set(exported) == names
        assert exported == sorted(exported, key=lambda n: (not n.isupper(), n))
        assert all(hasattr(module, public) for public in names)


@pytest.mark.parametrize("name", MODULES)
def test_public_modules_hold_their_public_names(name):
    module = importlib.import_module(f"speechbrain_rev.{name}")
    held = {
        public
        for public, value in vars(module).items()
        if not public.startswith("_")
        and (public.isupper() or getattr(value, "__module__", None) == module.__name__)
    }
    assert MODULES[name] <= held


#: Imports some modules after the other, the first of them each as if it were alone, and
#: says what is loaded after each.
IMPORT = """
import importlib, json, sys
alone, *names = sys.argv[1:]
loaded = {}
for name in names:
    if len(loaded) < int(alone):
        for known in [m for m in sys.modules if m.startswith("speechbrain_rev")]:
            del sys.modules[known]
    importlib.import_module(name)
    loaded[name] = sorted({module.partition(".")[0] for module in sys.modules})
import torch
assert not torch.cuda.is_initialized()
print(json.dumps(loaded))
"""
WITHOUT_TORCH = ["", ".architectures", ".catalog", ".hparams", ".cli", ".scoring"]
OF_A_PLAIN_LOOP = [
    ".lobes", ".lobes.classifier", ".optim", ".planner", ".reversible"
]  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    """Names of the packages that are loaded after each module, in this order."""
    walked = pkgutil.walk_packages([str(PACKAGE)], "speechbrain_rev.")
    everything = [m.name for m in walked if not m.name.endswith("__main__")]
    first = [f"speechbrain_rev{name}" for name in WITHOUT_TORCH + OF_A_PLAIN_LOOP]
    names = list(dict.fromkeys(first + everything))
    program = [sys.executable, "-c", IMPORT, str(len(WITHOUT_TORCH)), *names]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_importing_everything_brings_no_optional_package_and_no_cuda(loaded):
    *_, all_loaded = loaded.values()
    assert {"torch", "speechbrain"} <= set(all_loaded)
    optional = {
        "bitsandbytes",
        "triton",
        "matplotlib",
        "onnx",
        "onnxscript",
        "onnxruntime",
    }
    assert not optional & set(all_loaded)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_needs_no_torch_does_not_import_it(name, loaded):
    assert not {"torch", "speechbrain"} & set(loaded[f"speechbrain_rev{name}"])


@pytest.mark.parametrize("name", OF_A_PLAIN_LOOP)
def test_what_a_plain_loop_takes_does_not_import_speechbrain(name, loaded):
    assert "speechbrain" not in loaded[f"speechbrain_rev{name}"]


def test_no_module_is_longer_than_one_sitting():
    root = PACKAGE.parent
    folders = [PACKAGE, root / "recipes", root / "tests" / "benchmarks"]
    lengths = {
        file.relative_to(root): len(file.read_text().splitlines())
        for folder in folders
        for file in folder.rglob("*.py")
    }
    assert len(lengths) > 50
    assert [str(file) for file, lines in lengths.items() if lines > 900] == []


def test_no_class_name_stands_twice():
    places = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(file.relative_to(PACKAGE))
    assert len(places) > 200
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
