"""Where the values in ``hparams/train.yaml`` come from, and their units.

A knob is a row here as it is one of ``KNOBS``; a test compares the two.
"""

from __future__ import annotations

#: What the words in the rows below stand for.
SOURCES = {
    "paper": '"Memory-Efficient Training for Deep Speaker Embedding Learning in Speaker '
    'Verification"; parts in brackets are its sections and tables.',
    "WeSpeaker": "its VoxCeleb recipe, `examples/voxceleb/v2/conf`: `resnet.yaml` for "
    "ResNets, `gemini_dfresnet_adam.yaml` for DF families, `resnet_lm.yaml` for "
    "large-margin fine-tuning. The paper states no schedule.",
    "SpeechBrain": "its VoxCeleb recipe, `train_ecapa_tdnn.yaml`, or its `Brain`.",
    "Jiang et al.": '"An Efficient Training Framework for Reversible Neural '
    'Architectures".',
    "error-bounded compression": '"A Novel Memory-Efficient Deep Learning Training '
    'Framework via Error-Bounded Lossy Compression".',
    "the study": "of reduced encoders on a small corpus: "
    "[what follows for the defaults](study.md#what-follows-for-the-defaults).",
    "ours": "our choice.",
}

#: For each knob its unit, which may be empty, and its source.
KNOB_SOURCES: dict[str, tuple[str, str]] = {
    # run
    "seed": ("", "SpeechBrain"),
    "output_folder": ("", "ours, after SpeechBrain"),
    "pretrained_run": ("", "ours"),
    "precision": ("", "ours; the paper states none"),
    "num_workers": ("processes", "SpeechBrain"),
    "ckpt_interval_steps": ("steps", "ours; the knob is SpeechBrain's"),
    "keep_checkpoints": ("checkpoints", "ours: as many as WeSpeaker averages"),
    "logger": ("", "SpeechBrain's loggers; the knob is ours"),
    "wandb_project": ("", "ours"),
    # encoder
    "arch": ("", "paper (III, Tables II to VI); which one is ours"),
    "widths": ("channels", "paper (Tables II to IV)"),
    "blocks": ("blocks", "paper (Tables II to IV)"),
    "n_mels": ("bands", "paper (V-C)"),
    "embedding_dim": ("values", "paper (V-C)"),
    "mode": (
        "",
        "reconstruct: paper (III); compress: error-bounded compression; which one by "
        "null is ours",
    ),
    "convolution_error": (
        "fraction of the momentum",
        "error-bounded compression (0.01 is the coefficient of its equation 8)",
    ),
    "normalisation_error": (
        "fraction of the deviation",
        "ours, by the benchmark compressed_bounds",
    ),
    "memory_budget": ("bytes, by the unit in the text", "after Jiang et al."),
    "max_gradient_error": ("fraction of the gradient's norm", "ours"),
    "plan_file": ("", "ours"),
    "streams": (
        "",
        "ours, by the study: after 3,150 steps weights are the same to the bit whether "
        "activations were stored or reconstructed; float streams took 11 % less time on a "
        "CPU, and end at other weights",
    ),
    "chunk": (
        "bytes for 200 frames",
        "ours, by the benchmark chunks: it changes memory and time; the study did not "
        "test it",
    ),
    "verify": ("", "ours"),
    "sync_batchnorm": ("", "ours; the paper states nothing"),
    "zero_init_residual": (
        "",
        "Goyal et al. 2017, section 5.1; ours, by the study: after 8 epochs the EER of "
        "resnet34, revnet46 and df_resnet56 was 8 to 18 points lower, that of df_revnet66 "
        "the same, with one seed",
    ),
    # data
    "data_folder": ("", "paper (V-A): VoxCeleb2 dev"),
    "sample_rate": ("Hz", "SpeechBrain"),
    "train_list": ("", "ours"),
    "trial_lists": ("", "ours; SpeechBrain has one, verification_file"),
    "trials_folder": ("", "ours"),
    "bad_files": ("", "ours"),
    "any_extension": ("", "ours"),
    "outside_files": ("", "ours"),
    "check_audio": ("", "ours"),
    "max_unread": ("files", "ours"),
    "valid_speakers": ("speakers", "ours; the paper trains on all (V-A), which 0 does"),
    "valid_trials": ("", "ours"),
    "chunk_samples": ("samples", "paper (V-C): 200 frames"),
    "sentence_len": ("s", "ours: what chunk_samples need at the fastest speed"),
    "out_n_neurons": ("speakers x speeds", "paper (V-A): 5994 speakers, three speeds"),
    # augmentation
    "speeds": ("times", "paper (V-A)"),
    "augment_prob": ("probability", "paper (V-A)"),
    "noise_folder": ("", "paper (V-A): MUSAN"),
    "rir_folder": ("", "paper (V-A): RIR"),
    "snr_low": (
        "dB",
        "SpeechBrain; the ranges of folders are Kaldi's, of its x-vector recipe",
    ),
    "snr_high": ("dB", "SpeechBrain"),
    # objective
    "margin": ("radians", "paper (V-C)"),
    "scale": ("", "paper (V-C)"),
    "margin_start_epoch": ("epochs", "WeSpeaker"),
    "margin_end_epoch": ("epochs", "WeSpeaker"),
    # optimizer
    "optimizer_name": ("", "paper (V-C)"),
    "optimizer_bits": (
        "bits",
        "paper (IV); by the study a step of AdamW is off by 1 to 2 %, that of the "
        "classifier by 3 to 6 %, so that no layer has to stay at 32; SGD was not "
        "studied",
    ),
    "lr": ("", "WeSpeaker"),
    "final_lr": ("", "WeSpeaker"),
    "weight_decay": (
        "",
        "paper (V-C); in the study neither none nor 0.2 of AdamW was clearly better than "
        "0.05, and SGD's was not tried",
    ),
    "momentum": ("", "paper (V-C); WeSpeaker's is Nesterov's"),
    "max_grad_norm": (
        "",
        "SpeechBrain; in the study neither 1 nor no clipping was clearly better",
    ),
    "batch_size": ("utterances", "paper (VI-C)"),
    "number_of_epochs": ("epochs", "WeSpeaker"),
    "warmup_epochs": (
        "epochs",
        "WeSpeaker, for 150 epochs and more; of the 30 epochs of the study half an epoch "
        "and 4 did alike",
    ),
    "steps_per_epoch": ("steps", "ours"),
    "average_checkpoints": ("checkpoints", "WeSpeaker"),
    # scoring
    "cohort_top_n": ("speakers", "paper (V-D): a cohort of 600, as we read it"),
}
