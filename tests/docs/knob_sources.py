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
    "tensorboard": ("", "ours"),
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
        "ours, by the study: with float streams, and not with exact ones, trainings end "
        "with other weights than those that store",
    ),
    "chunk": ("bytes for 200 frames", "ours, by the benchmark chunks"),
    "verify": ("", "ours"),
    "sync_batchnorm": ("", "ours; the paper states nothing"),
    "zero_init_residual": ("", "Goyal et al. 2017, section 5.1; ours, by the study"),
    # data
    "data_folder": ("", "paper (V-A): VoxCeleb2 dev"),
    "sample_rate": ("Hz", "SpeechBrain"),
    "train_list": ("", "ours"),
    "trial_lists": ("", "ours; SpeechBrain has one, verification_file"),
    "trials_folder": ("", "ours"),
    "bad_files": ("", "ours"),
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
    "optimizer_bits": ("bits", "paper (IV); no tensor stays at 32 by the study"),
    "lr": ("", "WeSpeaker"),
    "final_lr": ("", "WeSpeaker"),
    "weight_decay": ("", "paper (V-C); kept by the study"),
    "momentum": ("", "paper (V-C); WeSpeaker's is Nesterov's"),
    "max_grad_norm": ("", "SpeechBrain; kept by the study"),
    "batch_size": ("utterances", "paper (VI-C)"),
    "number_of_epochs": ("epochs", "WeSpeaker"),
    "warmup_epochs": ("epochs", "WeSpeaker; the study has half an epoch"),
    "steps_per_epoch": ("steps", "ours"),
    "average_checkpoints": ("checkpoints", "WeSpeaker"),
    # scoring
    "cohort_top_n": ("speakers", "paper (V-D): a cohort of 600, as we read it"),
}
