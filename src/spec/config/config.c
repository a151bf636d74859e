/* The option table, and the resolution of options into a qd_config: presets, derived sizes, and
 * checks across keys with the remedy in the message. */
#include "spec/config/config.h"

#include "model/field_table.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIELD_OPTION(kind, member, key, fallback, limits, preset, hf, when, help) QD_FIELD_OPTION(kind, key, fallback, help, limits),
#define NO_OPTION(kind, member, words, preset)
#define SYNONYM_OPTION(key, one, other, help) QD_SYNONYM_OPTION(key, one, other, help),

/* Sizes that follow from the preset or from other keys are 0 here and resolved below. */
static const qd_option options_table[] = {
    {"model.preset", QD_OPTION_STRING, "", 0, 0, NULL, "name of a model; the other model keys override single dimensions of it", "model"},
    QD_MODEL_FIELDS(FIELD_OPTION, NO_OPTION)
    QD_MODEL_SYNONYMS(SYNONYM_OPTION)

    {"data.path", QD_OPTION_STRING, "", 0, 0, NULL, "text file, folder of text files, token shards, or a mixture a:0.7,b:0.3", "data"},
    {"data.format", QD_OPTION_ENUM, "text", 0, 0, "text|examples|preferences",
     "examples: .jsonl lines with prompt and completion, or messages, for fine-tuning; only completions count in the loss. preferences: "
     "lines with prompt, chosen and rejected, for DPO", NULL},
    {"data.chat_template", QD_OPTION_STRING, "", 0, 0, NULL,
     "examples with messages: tokenizer folder or .jinja file with the chat template; empty: the folder of data.tokenizer", NULL},
    {"data.overlong", QD_OPTION_ENUM, "cut", 0, 0, "cut|skip|refuse", "examples of more than data.seq + 1 tokens: they lose their end, are "
     "skipped, or end the run with a message", NULL},
    {"data.tokenizer", QD_OPTION_STRING, "", 0, 0, NULL,
     "tokenizer.json or tiktoken file, or bytes; empty: bytes if model.vocab is 256, otherwise a tokenizer with model.vocab entries is "
     "trained on the text and saved in run.dir",
     "tokenizer"},
    {"data.special", QD_OPTION_ENUM, "plain", 0, 0, "parse|plain|refuse",
     "special tokens in the text: their ids, ordinary text, or an error; parse is for trusted text only", NULL},
    {"data.validation", QD_OPTION_FLOAT, "0", 0, 0.9, NULL, "fraction of each source that is held out, taken from its end", NULL},
    {"data.eval_path", QD_OPTION_STRING, "", 0, 0, NULL,
     "text or token shards to evaluate on, like data.path; empty: the part that data.validation holds out", NULL},
    {"data.document_mask", QD_OPTION_BOOL, "false", 0, 0, NULL, "tokens attend only to their own document", NULL},
    {"data.separator", QD_OPTION_STRING, "", 0, 0, NULL, "line that ends a document; empty: each file is one document", NULL},
    {"data.field", QD_OPTION_STRING, "text", 0, 0, NULL, "member of each line of .jsonl files that holds the document", NULL},
    {"data.cache", QD_OPTION_STRING, "", 0, 0, NULL,
     "folder for the tokens of text files; empty: run.dir/tokens, or memory without run.dir", NULL},
    {"data.verify", QD_OPTION_BOOL, "true", 0, 0, NULL, "verify all checksums and tokens of shards at the start", NULL},
    {"data.seq", QD_OPTION_INT, "256", 1, 1e8, NULL, "sequence length in tokens", "seq"},

    {"train.steps", QD_OPTION_INT, "100", 1, 1e12, NULL, "optimizer steps", "steps"},
    {"train.epochs", QD_OPTION_FLOAT, "0", 0, 1e9, NULL,
     "passes over the training data, instead of train.steps: steps of train.global_batch sequences, rounded up; 0: train.steps", "epochs"},
    {"train.global_batch", QD_OPTION_INT, "32", 1, 1e9, NULL, "sequences per step, over all ranks", NULL},
    {"train.micro_batch", QD_OPTION_INT, "0", 0, 1e9, NULL, "sequences that a rank computes at once; 0: all of its share", NULL},
    {"train.eval_every", QD_OPTION_STRING, "0", 0, 0, NULL,
     "validation while training: steps between evaluations, or training time as in 90s, 10min or 2h, and one after the last step; 0: none",
     "eval-every"},
    {"train.eval_batches", QD_OPTION_INT, "0", 0, 1e12, NULL,
     "global batches of an evaluation, evenly spaced over the held-out windows; 0: all windows", NULL},
    {"train.optimizer", QD_OPTION_ENUM, "adamw", 0, 0, "adamw|sgd|muon",
     "optimizer; muon: orthogonalized momentum for the matrices of blocks, AdamW for everything else", NULL},
    {"train.lr", QD_OPTION_FLOAT, "1e-3", 0, 1e3, NULL, "peak learning rate", "lr"},
    {"train.min_lr", QD_OPTION_FLOAT, "0", 0, 1e3, NULL, "learning rate at the end of the decay", NULL},
    {"train.schedule", QD_OPTION_ENUM, "cosine", 0, 0, "cosine|linear|constant|wsd",
     "learning rate after the warmup; wsd: constant, then linear decay", NULL},
    {"train.warmup", QD_OPTION_INT, "0", 0, 1e12, NULL, "steps in which the learning rate rises from 0", NULL},
    {"train.decay_steps", QD_OPTION_INT, "0", 0, 1e12, NULL, "wsd: steps of the decay at the end; 0: a fifth of all steps", NULL},
    {"train.beta1", QD_OPTION_FLOAT, "0.9", 0, 0.999999, NULL, "AdamW: decay of the first moment", NULL},
    {"train.beta2", QD_OPTION_FLOAT, "0.95", 0, 0.99999999, NULL, "AdamW: decay of the second moment", NULL},
    {"train.eps", QD_OPTION_FLOAT, "1e-8", 1e-30, 1, NULL, "AdamW: added to the square root of the second moment", NULL},
    {"train.momentum", QD_OPTION_FLOAT, "0", 0, 0.999999, NULL, "SGD: momentum", NULL},
    {"train.muon_momentum", QD_OPTION_FLOAT, "0.95", 0, 0.999999, NULL, "Muon: decay of the momentum", NULL},
    {"train.muon_nesterov", QD_OPTION_BOOL, "true", 0, 0, NULL, "Muon: Nesterov momentum", NULL},
    {"train.muon_steps", QD_OPTION_INT, "5", 1, 100, NULL, "Muon: Newton-Schulz iterations of the orthogonalization", NULL},
    {"train.muon_scale", QD_OPTION_ENUM, "match_rms_adamw", 0, 0, "match_rms_adamw|original",
     "Muon: learning-rate factor of a matrix; match_rms_adamw: 0.2 sqrt(max(rows, columns)), for a train.lr tuned for AdamW; original: "
     "sqrt(max(1, rows / columns))",
     NULL},
    {"train.muon_lr", QD_OPTION_FLOAT, "0", 0, 1e6, NULL,
     "Muon: peak learning rate of the matrices; follows the schedule of train.lr; 0: train.lr", NULL},
    {"train.qk_clip", QD_OPTION_FLOAT, "0", 0, 1e9, NULL,
     "QK-Clip: after the update, query and key weights of heads whose largest attention score of the step was above this are rescaled "
     "to it (Kimi K2: 100, with train.optimizer=muon); 0: off",
     NULL},
    {"train.weight_decay", QD_OPTION_FLOAT, "0.1", 0, 100, NULL, "decoupled weight decay; not applied to norms and biases", NULL},
    {"train.clip", QD_OPTION_FLOAT, "1", 0, 1e9, NULL, "maximum gradient norm; 0: no clipping", NULL},
    {"train.on_nonfinite", QD_OPTION_ENUM, "stop", 0, 0, "stop|skip",
     "if a loss or gradient is not finite, the weights stay unchanged; stop: the run ends; skip: it continues, but ends after 20 such "
     "steps in a row",
     NULL},
    {"train.on_spike", QD_OPTION_ENUM, "ignore", 0, 0, "ignore|skip|rollback|stop",
     "if the gradient norm or the loss is far above that of the steps before; skip: the weights stay unchanged, the run continues with "
     "the next batch, and ends after 20 such steps in a row; rollback: the run continues from its last checkpoint with the batches after "
     "the spike; spikes.jsonl in run.dir lists them",
     NULL},
    {"train.spike_norm", QD_OPTION_FLOAT, "10", 0, 1e9, NULL, "train.on_spike: gradient norm over the median of the steps before; 0: any",
     NULL},
    {"train.spike_loss", QD_OPTION_FLOAT, "1", 0, 1e9, NULL, "train.on_spike: loss above the median of the steps before, in nats; 0: any",
     NULL},
    {"train.spike_window", QD_OPTION_INT, "100", 5, 100000, NULL,
     "train.on_spike: steps before that the medians are of; no step is a spike until there are so many", NULL},
    {"train.seed", QD_OPTION_INT, "1", 0, 9e15, NULL, "random seed of initial weights, sample order and dropout", "seed"},
    {"train.precision", QD_OPTION_ENUM, "fp32", 0, 0, "fp32|bf16|fp8",
     "bf16: weights, gradients and activations in bf16, with fp32 master weights; fp8: as bf16, but GEMMs of the linear layers of "
     "blocks multiply in fp8",
     NULL},
    {"train.master", QD_OPTION_ENUM, "fp32", 0, 0, "fp32|split",
     "bf16: how master weights are stored; split: only their low 16 bits, 2 bytes instead of 4; the update of AdamW and SGD combines "
     "them with the bf16 weight",
     NULL},
    {"train.grad_dtype", QD_OPTION_ENUM, "auto", 0, 0, "auto|fp32|bf16",
     "type in which gradients are stored and reduced; auto: that of train.precision, but fp32 with model.router_bias_rate, which counts "
     "tokens in gradients; bf16 rounds after every micro-batch and chunk of the head, fp32 does not",
     NULL},
    {"train.deterministic", QD_OPTION_BOOL, "false", 0, 0, NULL,
     "cuda: use only kernels that are bit-identical from run to run; those of the cpu always are", NULL},
    {"train.grad_sync", QD_OPTION_ENUM, "auto", 0, 0, "auto|per_step|per_microbatch",
     "when gradients are reduced over ranks; auto: per step, with zero 2 and 3 per micro-batch, which needs no memory for whole "
     "gradients",
     NULL},
    {"train.swiglu", QD_OPTION_ENUM, "auto", 0, 0, "auto|keep|again",
     "SwiGLU results: keep them for the backward pass, or recompute them along with their gradients, which takes less memory and moves "
     "more bytes; auto: again in routed experts, on GPUs and in fp8, where it also applies to GELU and moves no more",
     NULL},
    {"train.recompute", QD_OPTION_ENUM, "none", 0, 0, "none|selective|full",
     "what blocks recompute in the backward pass instead of keeping it: nothing, memory-bound ops, or everything except their input", NULL},
    {"train.recompute_layers", QD_OPTION_INT, "-1", -1, 100000, NULL,
     "number of blocks that recompute, starting with the first; -1: all", NULL},
    {"train.offload", QD_OPTION_ENUM, "none", 0, 0, "none|optimizer",
     "optimizer: keep optimizer state (master weights, moments) in host memory and move it through the device in chunks during the "
     "update; results are bit-identical",
     NULL},
    {"train.offload_chunk_mb", QD_OPTION_FLOAT, "32", 0.0001, 1e6, NULL,
     "offload: MiB of state per chunk; the device has buffers for three chunks", NULL},

    {"dpo.loss", QD_OPTION_ENUM, "sigmoid", 0, 0, "sigmoid|robust|hinge|ipo",
     "data.format=preferences: loss of a pair of completions, as in trl; sigmoid: DPO, with label smoothing cDPO", NULL},
    {"dpo.beta", QD_OPTION_FLOAT, "0.1", 1e-9, 1e6, NULL, "strength of the tie to the reference model: the model before training", NULL},
    {"dpo.label_smoothing", QD_OPTION_FLOAT, "0", 0, 0.499, NULL, "probability that a preference is wrong; of sigmoid and robust", NULL},

    {"fp8.recipe", QD_OPTION_ENUM, "tensor", 0, 0, "tensor|row|block",
     "fp8: which values of an operand share a scale; tensor: all; row: those of a row along the sum; block: 128 along the sum, of "
     "weights 128 x 128; on GPUs row and block need compute capability 9.0 (Hopper)", NULL},
    {"fp8.grad", QD_OPTION_ENUM, "e5m2", 0, 0, "e5m2|e4m3",
     "fp8: format of the gradients of activations; weights and activations are e4m3", NULL},
    {"fp8.keep", QD_OPTION_STRING, "", 0, 0, NULL,
     "fp8: linear layers that stay in bf16, by the start of their names: attn, mlp.down or attn.q,attn.out for example; the head, "
     "routers and adapters always do",
     NULL},
    {"fp8.weights", QD_OPTION_ENUM, "auto", 0, 0, "auto|step|use",
     "fp8: when weights are cast; step: once per step, which keeps 2 bytes per weight; use: for each use, with scales of tensors found "
     "once per step; auto: once per step if it has several micro-batches, but not where parallel.zero=3 frees weights after use; results "
     "are bit-identical",
     NULL},

    {"lora.rank", QD_OPTION_INT, "0", 0, 65536, NULL,
     "low-rank adapters (LoRA): rank of their matrices; the model is frozen and only they are trained; 0: all parameters are trained",
     "lora"},
    {"lora.alpha", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "what adapters add is multiplied by alpha / rank; 0: alpha is the rank", NULL},
    {"lora.rslora", QD_OPTION_BOOL, "false", 0, 0, NULL, "multiply by alpha / sqrt(rank) instead", NULL},
    {"lora.dropout", QD_OPTION_FLOAT, "0", 0, 0.999, NULL, "dropout on the input of adapters; layers with a common input share the mask",
     NULL},
    {"lora.targets", QD_OPTION_STRING, "all-linear", 0, 0, NULL,
     "layers that have adapters, by PEFT's names: some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj (of experts too)"
     ", router and shared_expert_gate; all-linear: all of them except routers",
     NULL},

    {"parallel.ranks", QD_OPTION_INT, "1", 1, 65536, NULL, "local ranks to start; mpirun and srun set the number themselves", "ranks"},
    {"parallel.dp", QD_OPTION_INT, "-1", -1, 65536, NULL, "data-parallel degree; -1: the rest of the world", "dp"},
    {"parallel.tp", QD_OPTION_INT, "1", -1, 65536, NULL, "tensor-parallel degree", "tp"},
    {"parallel.sp", QD_OPTION_BOOL, "true", 0, 0, NULL,
     "with tp above 1, sequence parallelism: between GEMMs, ranks of tp hold slices of the rows instead of all rows", NULL},
    {"parallel.tp_overlap", QD_OPTION_INT, "1", 1, 64, NULL,
     "with tp above 1: number of pieces that GEMMs next to a tp collective are cut into, so that the collective of one piece overlaps "
     "with the GEMM of the next; 1: no overlap",
     NULL},
    {"parallel.pp", QD_OPTION_INT, "1", -1, 65536, NULL, "pipeline-parallel degree", "pp"},
    {"parallel.schedule", QD_OPTION_ENUM, "1f1b", 0, 0, "1f1b|gpipe|interleaved|zb_h1|zb_v|dualpipe_v|file",
     "pipeline schedule (docs/pipeline.md); file: read from parallel.schedule_file, which also works without this key", "schedule"},
    {"parallel.virtual_stages", QD_OPTION_INT, "0", 0, 1024, NULL,
     "pipeline stages per rank; 0: default of the schedule (interleaved: 2)", NULL},
    {"parallel.layers", QD_OPTION_STRING, "", 0, 0, NULL,
     "number of blocks of each stage, as in 2,1,1,1; empty: balanced by cost, including embedding and head", NULL},
    {"parallel.schedule_file", QD_OPTION_STRING, "", 0, 0, NULL,
     "read the schedule from a file instead of using parallel.schedule: one line per rank with turns like 0F0,0F1,0B0 (quadrille "
     "schedule --csv writes them)",
     NULL},
    {"parallel.cp", QD_OPTION_INT, "1", -1, 65536, NULL, "context-parallel degree", "cp"},
    {"parallel.cp_mode", QD_OPTION_ENUM, "ring", 0, 0, "ring|gather|ulysses",
     "with cp above 1, how queries reach the keys of other ranks; ring: keys and values pass from rank to rank; gather: every rank "
     "gathers all of them; ulysses: an all-to-all exchanges heads for positions",
     NULL},
    {"parallel.ep", QD_OPTION_INT, "1", 1, 65536, NULL,
     "expert-parallel degree: ranks that hold different experts; etp x ep are neighbours among the ranks of tp, cp and dp, which are "
     "regrouped for experts",
     "ep"},
    {"parallel.etp", QD_OPTION_INT, "1", 1, 65536, NULL,
     "tensor-parallel degree of experts: ranks that shard the inner width of each expert", NULL},
    {"parallel.expert_rows", QD_OPTION_FLOAT, "2", 0.01, 1e6, NULL,
     "ep: buffer capacity for the rows of a rank's experts, as a multiple of a balanced load; rows that exceed it are sent in extra "
     "dispatch rounds",
     NULL},
    {"parallel.nodes", QD_OPTION_INT, "1", 1, 65536, NULL,
     "machines that the ranks run on; each has the same number of consecutive ranks", NULL},
    {"parallel.dispatch", QD_OPTION_ENUM, "flat", 0, 0, "flat|node",
     "ep over several nodes; flat: send a token's row to each of its experts; node: send it once to each node that holds some of them, "
     "and distribute it inside the node",
     NULL},
    {"parallel.zero", QD_OPTION_INT, "0", 0, 3, NULL,
     "what ranks of dp shard instead of replicating it: 1: optimizer state, 2: gradients too, 3: parameters too", "zero"},
    {"parallel.dp_shard", QD_OPTION_INT, "-1", -1, 65536, NULL,
     "zero: number of ranks of dp that share one sharded copy, the others being replicas; -1: all", NULL},
    {"parallel.prefetch", QD_OPTION_INT, "2", 1, 100000, NULL,
     "zero: modules whose parameters are gathered ahead of their use (zero 3: are in memory at once)", NULL},
    {"parallel.reshard_after_forward", QD_OPTION_STRING, "true", 0, 0, NULL,
     "zero 3: free parameters after the forward pass and gather them again (true), keep them (false), or keep them sharded over groups "
     "of this many ranks",
     NULL},
    {"parallel.overlap", QD_OPTION_BOOL, "true", 0, 0, NULL,
     "overlap communication with computation: reduce gradients during the backward pass, gather parameters ahead of use", NULL},
    {"parallel.bucket_mb", QD_OPTION_FLOAT, "16", 0.0001, 1e6, NULL, "MiB of gradients per reduction", NULL},
    {"parallel.split_backward", QD_OPTION_BOOL, "false", 0, 0, NULL,
     "compute gradients of inputs and of weights in separate actions", NULL},

    {"run.dir", QD_OPTION_STRING, "", 0, 0, NULL,
     "folder for config.yaml, effective.yaml, metrics.jsonl, checkpoints, a tokenizer trained by the run and trace.json; empty: nothing "
     "is saved",
     "dir"},
    {"run.overwrite", QD_OPTION_BOOL, "false", 0, 0, NULL, "replace an existing run in run.dir", "overwrite"},
    {"run.device", QD_OPTION_ENUM, "cpu", 0, 0, "cpu|cuda", "device that computes the model", "device"},
    {"run.kernels", QD_OPTION_ENUM, "auto", 0, 0, "auto|amx|avx512bf16|avx512|amx_emulated|avx512bf16_emulated|avx2|neon|generic",
     "cpu: instruction set of the kernels; results are bit-identical within one, not between two; auto: the fastest that the machine has",
     NULL},
    {"run.gpu", QD_OPTION_INT, "-1", -1, 1024, NULL,
     "cuda: GPU that all local ranks use; -1: rank r of a machine uses GPU r modulo the number of GPUs", NULL},
    {"run.tuning", QD_OPTION_STRING, "", 0, 0, NULL,
     "cuda: file that caches the algorithm of each GEMM; empty: in the user's cache folder; none: search in every run", NULL},
    {"run.tuning_seconds", QD_OPTION_FLOAT, "2", 0, 3600, NULL,
     "cuda: time limit at the start for the search of algorithms that are not in run.tuning, which long runs continue between their "
     "first steps; 0: no search, use the library's choice; 3600: no limit",
     NULL},
    {"run.collectives", QD_OPTION_STRING, "", 0, 0, NULL,
     "cpu: file with the copies that suit the processor, measured once (0.3 s); empty: in the user's cache folder; none: built-in", NULL},
    {"run.backend", QD_OPTION_ENUM, "auto", 0, 0, "auto|local|mpi|ucx|nccl",
     "auto: mpi under mpirun or srun, ucx without MPI (torchrun, srun --mpi=none), else local; nccl: one rank per GPU", "backend"},
    {"run.ranks_as", QD_OPTION_ENUM, "processes", 0, 0, "processes|threads",
     "how local ranks run; threads are easier to debug", "ranks-as"},
    {"run.threads", QD_OPTION_INT, "0", 0, 4096, NULL, "compute threads per rank; 0: divide the cores evenly", "threads"},
    {"run.deadline", QD_OPTION_FLOAT, "60", 0.1, 1e6, NULL,
     "seconds that a rank may be missing from an operation before the run fails and names it", NULL},
    {"run.secret_file", QD_OPTION_STRING, "", 0, 0, NULL,
     "ranks without MPI: the file with their common secret, not open to other users; else the variable QUADRILLE_SECRET", NULL},
    {"run.interface", QD_OPTION_STRING, "", 0, 0, NULL,
     "ranks without MPI: the network interface to use, by name or address; empty: the one on the way to rank 0", NULL},
    {"run.join_deadline", QD_OPTION_FLOAT, "300", 0.1, 1e6, NULL,
     "ranks without MPI: seconds that they wait for all, at the start and after the loss of one (see run.rejoin_wait)", NULL},
    {"run.rejoin_wait", QD_OPTION_FLOAT, "30", 1, 1e6, NULL,
     "run.elastic without MPI: seconds that ranks wait for a lost one to return before the run continues with those that are left", NULL},
    {"run.memory_check", QD_OPTION_BOOL, "true", 0, 0, NULL,
     "cpu: refuse to start if the ranks need more memory than their machine has free; false: start anyway", NULL},
    {"run.save", QD_OPTION_BOOL, "true", 0, 0, NULL,
     "write checkpoints to run.dir: after the last step, on every orderly stop (Ctrl-C, SIGTERM, SIGUSR1, non-finite numbers) and at the "
     "intervals below; false: none at all",
     NULL},
    {"run.save_minutes", QD_OPTION_FLOAT, "30", 0, 1e6, NULL,
     "minutes between checkpoints, each at the end of a step while training waits; 0: none by time", "save-minutes"},
    {"run.save_every", QD_OPTION_INT, "0", 0, 1e12, NULL, "steps between checkpoints; 0: none by steps", "save-every"},
    {"run.async_save", QD_OPTION_BOOL, "true", 0, 0, NULL,
     "with run.save_every, write checkpoints from a copy in host memory while training continues; false: training waits, and no copy is "
     "kept",
     NULL},
    {"run.save_overlap", QD_OPTION_INT, "1", 1, 1e12, NULL,
     "with run.async_save, steps that may be done while a checkpoint is written; then training waits for it: a failure loses at most "
     "run.save_every + run.save_overlap - 1 steps",
     NULL},
    {"run.save_best", QD_OPTION_BOOL, "true", 0, 0, NULL,
     "with train.eval_every, write a checkpoint when the validation loss is the lowest so far; it is named checkpoints/best and kept "
     "in addition to run.keep",
     NULL},
    {"run.keep", QD_OPTION_INT, "2", 0, 1e6, NULL, "number of checkpoints to keep; 0: all", NULL},
    {"run.weights", QD_OPTION_STRING, "", 0, 0, NULL,
     "run folder, checkpoint or Hugging Face folder with the initial weights; the model must be the same", "weights"},
    {"run.from", QD_OPTION_STRING, "", 0, 0, NULL,
     "Hugging Face folder, run folder or checkpoint to start from: its model, its tokenizer and its weights, as far as they are not given",
     "from"},
    {"run.resume", QD_OPTION_BOOL, "false", 0, 0, NULL,
     "resume from the newest valid checkpoint in run.dir, on the same or a different layout", "resume"},
    {"run.check_replicas", QD_OPTION_INT, "-1", -1, 1e12, NULL,
     "steps between comparisons of the weights and optimizer state of replicas, which are also compared before each checkpoint; 0: "
     "never; -1: 100 on CPUs, never on GPUs",
     NULL},
    {"run.on_difference", QD_OPTION_ENUM, "stop", 0, 0, "stop|heal",
     "if replicas differ, stop: the run ends and names the rank; heal: of three or more, the rank that the majority contradicts gets "
     "the tensors of the others",
     NULL},
    {"run.check_gradients", QD_OPTION_INT, "0", 0, 1e12, NULL,
     "steps between steps whose gradients are computed twice and compared, so that a processor that computes wrongly is noticed and "
     "its rank named; 0: never; CPUs only",
     NULL},
    {"run.check_messages", QD_OPTION_BOOL, "false", 0, 0, NULL,
     "compare checksums of all data that ranks exchange: a damaged message ends the run before its data is used, and the ranks are "
     "named; results stay bit-identical",
     NULL},
    {"run.launcher", QD_OPTION_STRING, "", 0, 0, NULL,
     "run.restarts: the command that starts the ranks on several machines, such as 'mpirun -n 16 --host a:8,b:8' or 'srun --mpi=pmix'; "
     "the program and its arguments follow it. Replaced in it: {ranks}, their number, and with run.hosts {hosts} (a:8,b:8), {names} "
     "(a,b) and {nodes}, how many hosts",
     NULL},
    {"run.hosts", QD_OPTION_STRING, "", 0, 0, NULL,
     "run.launcher: file with a host per line, such as 'alpha slots=8'; those that do not answer or fail repeatedly are left out", NULL},
    {"run.host_check", QD_OPTION_STRING, "", 0, 0, NULL,
     "run.hosts: command that succeeds within ten seconds if {host} answers, such as 'ssh {host} true'; empty: all do", NULL},
    {"run.host_failures", QD_OPTION_INT, "2", 1, 1e6, NULL,
     "run.hosts: a host is excluded after so many failures in a row for which it is named, until the file changes", NULL},
    {"run.restarts", QD_OPTION_INT, "0", 0, 1e6, NULL,
     "how often ranks are started again after a failure, from the newest intact checkpoint; restarts.jsonl in run.dir is the "
     "journal",
     "restarts"},
    {"run.recover", QD_OPTION_ENUM, "replicas", 0, 0, "replicas|checkpoint",
     "run.restarts on CPUs, except with run.launcher: after the loss of a rank the others keep their processes, and the run continues "
     "from their state where replicas have what was lost; checkpoint: all ranks are started again from the newest checkpoint",
     NULL},
    {"run.elastic", QD_OPTION_STRING, "", 0, 0, NULL,
     "run.restarts: the number of ranks may change while the run continues, from the fewest to the most, such as 5..8; tp, cp and pp "
     "stay if they can, and dp takes the rest; without MPI, also while lost ranks are missing",
     NULL},
    {"run.available", QD_OPTION_STRING, "", 0, 0, NULL,
     "run.elastic: file with the number of ranks that may run now, which is read twice per second; empty: run.dir/available, which "
     "'quadrille resize' writes; no file: all",
     NULL},
    {"run.log_every", QD_OPTION_INT, "1", 1, 1e9, NULL, "steps between progress lines if the output is not a terminal", NULL},
    {"run.sample_every", QD_OPTION_INT, "0", 0, 1e12, NULL,
     "steps between sample texts, which the model writes to samples.jsonl in run.dir, and after the last step; 0: none", "sample-every"},
    {"run.sample_prompts", QD_OPTION_STRING, "", 0, 0, NULL,
     "with run.sample_every, what the texts continue: one prompt per line; empty: they start from the beginning of a document", NULL},
    {"run.sample_tokens", QD_OPTION_INT, "64", 1, 1e6, NULL, "with run.sample_every, tokens per text", NULL},
    {"run.sample_temperature", QD_OPTION_FLOAT, "0.8", 0, 100, NULL,
     "with run.sample_every, the temperature of sampling; 0: always the most likely token", NULL},
    {"run.tensorboard", QD_OPTION_BOOL, "false", 0, 0, NULL, "write TensorBoard event files to run.dir/tensorboard", "tensorboard"},
    {"run.csv", QD_OPTION_BOOL, "false", 0, 0, NULL, "write metrics.csv to run.dir, with the figures of metrics.jsonl", NULL},
    {"run.trace", QD_OPTION_BOOL, "false", 0, 0, NULL, "write trace.json (Perfetto) to run.dir", "trace"},
    {"run.trace_steps", QD_OPTION_INT, "20", 1, 1e6, NULL, "number of traced steps, starting with the first", NULL},
};

qd_option_table qd_config_table(void)
{
    return QD_OPTION_TABLE(options_table);
}

/* A preset on the command line has no effect over a file that sets every dimension, as run folders
 * do. */
static qd_status check_preset_counts(const qd_options *o, const char *preset)
{
    static const char *const sizes[] = {"model.layers", "model.hidden", "model.heads", "model.kv_heads", "model.ffn"};
    const char *command = qd_options_origin(o, "model.preset");
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (!qd_options_is_set(o, sizes[i]) || strcmp(qd_options_origin(o, sizes[i]), command) == 0)
            return QD_OK;
    return strcmp(command, "command line") != 0
               ? QD_OK
               : QD_FAIL(QD_USAGE, "model.preset is %s, but %s and the keys after it set all sizes of the model: remove one of them",
                         preset, qd_options_origin(o, "model.layers"));
}

/* With a preset, only keys that the user set override it; without one, all defaults apply. */
static qd_status resolve_model(const qd_options *o, int64_t seq, qd_model *m)
{
    const char *preset = qd_options_string(o, "model.preset");
    bool plain = preset[0] == '\0';
    if (plain) {
        *m = qd_model_default((qd_arch)qd_options_enum(o, "model.arch"));
        snprintf(m->name, sizeof m->name, "%s", qd_arch_name(m->arch));
    } else {
        QD_TRY(qd_preset_find(preset, m));
        QD_TRY(check_preset_counts(o, preset));
        if (qd_options_is_set(o, "model.arch") && strcmp(qd_options_string(o, "model.arch"), qd_arch_name(m->arch)) != 0)
            return QD_FAIL(QD_USAGE, "model.arch is %s, but the preset %s is %s: remove one of them", qd_options_string(o, "model.arch"),
                           preset, qd_arch_name(m->arch));
    }
    /* Derived sizes of the preset no longer hold if the user changed what they derive from. */
    bool new_hidden = qd_options_is_set(o, "model.hidden");
    if (new_hidden || qd_options_is_set(o, "model.heads") || qd_model_is_latent(m))
        m->head_dim = 0;
    if (qd_model_is_latent(m) && qd_options_is_set(o, "model.heads"))
        m->kv_heads = 0;
    if (new_hidden)
        m->ffn = 0;
    QD_TRY(qd_model_take(o, plain, m));
    if (strcmp(qd_options_string(o, "model.router_bias"), "auto") == 0 && (plain || qd_options_is_set(o, "model.router_bias_rate")))
        m->moe.bias = m->moe.bias_rate > 0.0;
    if (m->kv_heads == 0)
        m->kv_heads = m->heads;
    if (qd_model_is_latent(m))
        qd_latent_derive(m);
    if (m->head_dim == 0) {
        if (m->hidden % m->heads != 0)
            return QD_FAIL(QD_USAGE, "model.hidden (%lld) is not a multiple of model.heads (%d): set model.head_dim",
                           (long long)m->hidden, m->heads);
        m->head_dim = (int)(m->hidden / m->heads);
    }
    if (m->ffn == 0)
        m->ffn = qd_activation_is_gated(m->activation) ? (m->hidden * 8 / 3 + 31) / 32 * 32 : 4 * m->hidden;
    if (m->moe.ffn == 0)
        m->moe.ffn = m->ffn;
    if (m->moe.shared_ffn == m->moe.shared * m->moe.ffn)
        m->moe.shared_ffn = 0; /* it follows from the others */
    if (m->position == QD_POSITION_LEARNED && m->max_seq == 0)
        m->max_seq = seq;
    if (m->position == QD_POSITION_LEARNED && seq > m->max_seq)
        return QD_FAIL(QD_USAGE, "data.seq is %lld, but the model has %lld learned positions: lower data.seq or raise model.max_seq",
                       (long long)seq, (long long)m->max_seq);
    return qd_model_validate(m);
}

/* Warmup and decay fit into the steps. */
static qd_status check_schedule_length(qd_optim *c)
{
    if (c->warmup > c->steps)
        return QD_FAIL(QD_USAGE,
                       "train.warmup (%lld) is longer than train.steps (%lld): set train.warmup=%lld (a tenth of the steps is usual), or "
                       "train.steps to at least %lld",
                       (long long)c->warmup, (long long)c->steps, (long long)(c->steps / 10), (long long)c->warmup);
    if (c->decay_steps == 0)
        c->decay_steps = c->steps / 5;
    if (c->warmup + c->decay_steps > c->steps && c->schedule == QD_LR_WSD)
        return QD_FAIL(QD_USAGE,
                       "train.warmup (%lld) and train.decay_steps (%lld) are longer than train.steps (%lld) together: set "
                       "train.warmup=%lld and train.decay_steps=%lld, or train.steps to at least %lld",
                       (long long)c->warmup, (long long)c->decay_steps, (long long)c->steps, (long long)(c->steps / 10),
                       (long long)(c->steps / 5), (long long)(c->warmup + c->decay_steps));
    return QD_OK;
}

static bool given(const qd_options *o, const char *key)
{
    return strcmp(qd_options_origin(o, key), "command line") == 0;
}

bool qd_config_by_epochs(const qd_options *o)
{
    bool steps = qd_options_is_set(o, "train.steps") && given(o, "train.steps") && !given(o, "train.epochs");
    return qd_options_float(o, "train.epochs") > 0.0 && !steps;
}

qd_status qd_config_set_length(qd_config *c, int64_t windows)
{
    if (c->epochs <= 0.0)
        return QD_OK;
    double steps = ceil(c->epochs * (double)windows / (double)c->global_batch);
    if (steps > 1e12)
        return QD_FAIL(QD_USAGE, "train.epochs=%g of %lld sequences are more than 1e12 steps", c->epochs, (long long)windows);
    c->steps = c->optimizer.steps = steps < 1.0 ? 1 : (int64_t)steps;
    qd_status status = check_schedule_length(&c->optimizer);
    return status == QD_OK ? QD_OK
                           : qd_error_prefix(status, "train.epochs=%g of %lld sequences are %lld steps: ", c->epochs, (long long)windows,
                                             (long long)c->steps);
}

static qd_status resolve_optimizer(const qd_options *o, qd_optim *c)
{
    *c = (qd_optim){
        .kind = (qd_optim_kind)qd_options_enum(o, "train.optimizer"),
        .schedule = (qd_lr_schedule)qd_options_enum(o, "train.schedule"),
        .lr = qd_options_float(o, "train.lr"),
        .min_lr = qd_options_float(o, "train.min_lr"),
        .beta1 = qd_options_float(o, "train.beta1"),
        .beta2 = qd_options_float(o, "train.beta2"),
        .eps = qd_options_float(o, "train.eps"),
        .momentum = qd_options_float(o, "train.momentum"),
        .weight_decay = qd_options_float(o, "train.weight_decay"),
        .clip = qd_options_float(o, "train.clip"),
        .steps = qd_options_int(o, "train.steps"),
        .warmup = qd_options_int(o, "train.warmup"),
        .decay_steps = qd_options_int(o, "train.decay_steps"),
        .muon_momentum = qd_options_float(o, "train.muon_momentum"),
        .muon_lr = qd_options_float(o, "train.muon_lr"),
        .muon_nesterov = qd_options_bool(o, "train.muon_nesterov"),
        .muon_steps = (int)qd_options_int(o, "train.muon_steps"),
        .muon_scale = (qd_muon_scale)qd_options_enum(o, "train.muon_scale"),
        .qk_clip = qd_options_float(o, "train.qk_clip"),
    };
    if (c->min_lr > c->lr)
        return QD_FAIL(QD_USAGE, "train.min_lr (%g) is above train.lr (%g)", c->min_lr, c->lr);
    if (!qd_config_by_epochs(o)) /* otherwise once the length is known */
        QD_TRY(check_schedule_length(c));
    if (c->kind != QD_OPTIM_SGD && c->momentum != 0.0)
        return QD_FAIL(QD_USAGE, "train.momentum belongs to train.optimizer=sgd; AdamW has train.beta1, Muon train.muon_momentum");
    if (c->muon_lr > 0.0 && c->lr <= 0.0)
        return QD_FAIL(QD_USAGE, "train.muon_lr follows the schedule of train.lr, which must be above 0");
    return QD_OK;
}

/* true, false, or a number of ranks. */
static qd_status resolve_reshard(const qd_options *o, int *reshard)
{
    const char *key = "parallel.reshard_after_forward", *text = qd_options_string(o, key);
    char *end;
    long ranks = strtol(text, &end, 10);
    if (strcmp(text, "true") == 0 || strcmp(text, "false") == 0) {
        *reshard = text[0] == 't' ? QD_RESHARD_ALL : QD_RESHARD_NEVER;
        return QD_OK;
    }
    if (text[0] == '\0' || *end != '\0' || ranks < 2 || ranks > 65536)
        return QD_FAIL(QD_USAGE, "%s is '%s': it must be true, false, or a number of ranks from 2 on", key, text);
    *reshard = (int)ranks;
    return QD_OK;
}

static qd_status resolve_sharding(const qd_options *o, qd_strategy *s)
{
    s->zero = (int)qd_options_int(o, "parallel.zero");
    s->prefetch = (int)qd_options_int(o, "parallel.prefetch");
    int64_t shard = qd_options_int(o, "parallel.dp_shard");
    if (shard == 0)
        return QD_FAIL(QD_USAGE, "parallel.dp_shard is 0: it must be at least 1, or -1 for all ranks of dp");
    s->shard = shard < 0 ? 0 : (int)shard;
    int sync = qd_options_enum(o, "train.grad_sync");
    s->sync_each = sync == 0 ? s->zero >= 2 : sync == 2;
    return resolve_reshard(o, &s->reshard);
}

/* Steps, or a time with its unit. */
static qd_status resolve_evaluation(const qd_options *o, qd_evaluation_config *e)
{
    static const struct {
        const char *unit;
        double seconds;
    } units[] = {{"s", 1.0}, {"min", 60.0}, {"h", 3600.0}};
    const char *key = "train.eval_every", *text = qd_options_string(o, key);
    char *end;
    *e = (qd_evaluation_config){.batches = qd_options_int(o, "train.eval_batches"), .path = qd_options_string(o, "data.eval_path"),
                                .save_best = qd_options_bool(o, "run.save_best")};
    double amount = strtod(text, &end);
    bool number = text[0] >= '0' && text[0] <= '9' && amount >= 0.0 && amount <= 1e12, steps = number && *end == '\0';
    if (steps && amount == floor(amount))
        e->every = (int64_t)amount;
    while (number && *end == ' ')
        end++;
    for (size_t i = 0; i < sizeof units / sizeof *units && number && !steps; i++)
        if (strcmp(end, units[i].unit) == 0)
            e->seconds = amount * units[i].seconds;
    bool on = e->every > 0 || e->seconds > 0.0;
    if (!on && !(steps && amount == 0.0))
        return QD_FAIL(QD_USAGE, "%s is '%s': it must be a number of steps, or a time such as 90s, 10min or 2h; 0 turns it off", key, text);
    if (on && e->path[0] == '\0' && qd_options_float(o, "data.validation") <= 0.0)
        return QD_FAIL(QD_USAGE, "%s needs text to evaluate on: data.validation=0.02 holds out a part of data.path, data.eval_path names "
                                 "a text of its own", key);
    if (e->path[0] != '\0' && qd_options_enum(o, "data.format") > 0)
        return QD_FAIL(QD_UNSUPPORTED, "data.eval_path is a text, but data.format is %s: data.validation holds out some of them",
                       qd_options_string(o, "data.format"));
    if (!on && e->batches > 0)
        return QD_FAIL(QD_USAGE, "train.eval_batches has no effect without train.eval_every: set that, or remove it");
    return QD_OK;
}

/* Setting both is an error; otherwise the file would silently take precedence. */
static qd_status check_schedule(const qd_options *o)
{
    const char *kind = qd_options_string(o, "parallel.schedule"), *file = qd_options_string(o, "parallel.schedule_file");
    bool from_file = strcmp(kind, "file") == 0;
    if (file[0] != '\0' && qd_options_is_set(o, "parallel.schedule") && !from_file)
        return QD_FAIL(QD_USAGE, "parallel.schedule (%s) and parallel.schedule_file (%s) both select a schedule: set only one of them",
                       kind, file);
    if (file[0] == '\0' && from_file)
        return QD_FAIL(QD_USAGE, "parallel.schedule is file, but parallel.schedule_file is not set");
    return QD_OK;
}

qd_status qd_config_resolve(const qd_options *o, int world, qd_config *c)
{
    memset(c, 0, sizeof *c);
    int64_t seq = qd_options_int(o, "data.seq");
    QD_TRY(resolve_model(o, seq, &c->model));
    QD_TRY(qd_lora_resolve(o, &c->model));
    QD_TRY(resolve_optimizer(o, &c->optimizer));
    if (world > 0 && qd_options_is_set(o, "parallel.ranks") && qd_options_int(o, "parallel.ranks") != world)
        return QD_FAIL(QD_USAGE, "parallel.ranks is %lld, but %d ranks were started: remove it, or start that many",
                       (long long)qd_options_int(o, "parallel.ranks"), world);
    c->world = world > 0 ? world : (int)qd_options_int(o, "parallel.ranks");
    static const char *const keys[QD_AXIS_COUNT] = {"parallel.tp", "parallel.cp", "parallel.dp", "parallel.pp"};
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++) {
        c->degrees[axis] = (int)qd_options_int(o, keys[axis]);
        if (c->degrees[axis] == 0)
            return QD_FAIL(QD_USAGE, "%s is 0: it must be at least 1, or -1 for the rest of the world", keys[axis]);
    }
    bool bf16 = qd_options_enum(o, "train.precision") >= 1; /* fp8: except in GEMMs */
    int grad = qd_options_enum(o, "train.grad_dtype");
    /* in gradient buffers, where bf16 cannot count that far */
    bool counts_tokens = c->model.moe.experts > 0 && c->model.moe.bias_rate > 0.0;
    c->strategy = (qd_strategy){
        .seq = seq,
        .micro_batch = qd_options_int(o, "train.micro_batch"),
        .activation = bf16 ? QD_BF16 : QD_F32,
        .param = bf16 ? QD_BF16 : QD_F32,
        .grad = grad == 0 ? (bf16 && !counts_tokens ? QD_BF16 : QD_F32) : grad == 1 ? QD_F32 : QD_BF16,
        .optimizer = c->optimizer.kind,
        .momentum = c->optimizer.momentum > 0.0,
        .muon_steps = c->optimizer.muon_steps, .qk_clip = c->optimizer.qk_clip > 0.0,
        .overlap = qd_options_bool(o, "parallel.overlap"),
        .tensor_pieces = (int)qd_options_int(o, "parallel.tp_overlap"),
        .split_backward = qd_options_bool(o, "parallel.split_backward"),
        .bucket_bytes = (int64_t)(qd_options_float(o, "parallel.bucket_mb") * 1024.0 * 1024.0),
        .recompute = (qd_recompute)qd_options_enum(o, "train.recompute"),
        .recompute_layers = (int)qd_options_int(o, "train.recompute_layers"),
        .swiglu = (qd_swiglu)qd_options_enum(o, "train.swiglu"),
        .fp8 = {.on = qd_options_enum(o, "train.precision") == 2, .recipe = (qd_fp8_recipe)qd_options_enum(o, "fp8.recipe"),
                .grad = qd_options_enum(o, "fp8.grad") == 0 ? QD_F8E5M2 : QD_F8E4M3,
                .weights = (qd_fp8_weights)qd_options_enum(o, "fp8.weights")},
        .expert_rows = qd_options_float(o, "parallel.expert_rows"),
        .split_master = qd_options_enum(o, "train.master") == 1,
        .offload = qd_options_enum(o, "train.offload") == 1,
        .chunk_bytes = (int64_t)(qd_options_float(o, "train.offload_chunk_mb") * 1024.0 * 1024.0),
        .training = true,
    };
    c->strategy.cp_mode = (qd_cp_mode)qd_options_enum(o, "parallel.cp_mode");
    c->ep = (int)qd_options_int(o, "parallel.ep");
    c->etp = (int)qd_options_int(o, "parallel.etp");
    c->nodes = (int)qd_options_int(o, "parallel.nodes");
    c->by_node = qd_options_enum(o, "parallel.dispatch") == 1;
    c->sp = qd_options_bool(o, "parallel.sp");
    QD_TRY(check_schedule(o));
    c->pipeline = (qd_pipeline){
        .kind = (qd_schedule_kind)qd_options_enum(o, "parallel.schedule"),
        .virtual_stages = (int)qd_options_int(o, "parallel.virtual_stages"),
        .file = qd_options_string(o, "parallel.schedule_file"),
    };
    const char *layers = qd_options_string(o, "parallel.layers");
    if (strlen(layers) >= sizeof c->pipeline.layers)
        return QD_FAIL(QD_USAGE, "parallel.layers is longer than %zu characters", sizeof c->pipeline.layers - 1);
    memcpy(c->pipeline.layers, layers, strlen(layers) + 1);
    QD_TRY(resolve_sharding(o, &c->strategy));
    c->global_batch = qd_options_int(o, "train.global_batch");
    c->steps = c->optimizer.steps;
    c->epochs = qd_config_by_epochs(o) ? qd_options_float(o, "train.epochs") : 0.0;
    if (c->epochs > 0.0 && qd_options_is_set(o, "train.steps") && given(o, "train.steps") == given(o, "train.epochs"))
        return QD_FAIL(QD_USAGE, "train.steps (%lld) and train.epochs (%g) both set the length of the run: keep one of them",
                       (long long)c->steps, c->epochs);
    c->seed = (uint64_t)qd_options_int(o, "train.seed");
    c->data = (qd_data_config){
        .path = qd_options_string(o, "data.path"),
        .tokenizer = qd_options_string(o, "data.tokenizer"),
        .special = qd_options_string(o, "data.special"),
        .chat_template = qd_options_string(o, "data.chat_template"),
        .separator = qd_options_string(o, "data.separator"),
        .field = qd_options_string(o, "data.field"),
        .cache = qd_options_string(o, "data.cache"),
        .validation = qd_options_float(o, "data.validation"),
        .document_mask = qd_options_bool(o, "data.document_mask"),
        .verify = qd_options_bool(o, "data.verify"),
        .examples = qd_options_enum(o, "data.format") > 0,
        .pairs = strcmp(qd_options_string(o, "data.format"), "preferences") == 0,
        .overlong = qd_options_enum(o, "data.overlong"),
    };
    QD_TRY(qd_preference_resolve(o, c));
    QD_TRY(resolve_evaluation(o, &c->evaluation));
    c->run_dir = qd_options_string(o, "run.dir");
    c->memory_check = qd_options_bool(o, "run.memory_check");
    c->save = qd_options_bool(o, "run.save");
    c->save_every = c->save ? qd_options_int(o, "run.save_every") : 0;
    c->save_seconds = c->save ? 60.0 * qd_options_float(o, "run.save_minutes") : 0.0;
    c->async_save = qd_options_bool(o, "run.async_save");
    c->save_overlap = qd_options_int(o, "run.save_overlap");
    c->keep = (int)qd_options_int(o, "run.keep");
    c->resume = qd_options_bool(o, "run.resume");
    c->weights = qd_options_string(o, "run.weights");
    c->skip_nonfinite = qd_options_enum(o, "train.on_nonfinite") == 1;
    QD_TRY(qd_spikes_resolve(o, c));
    c->device = qd_options_string(o, "run.device");
    c->strategy.traits = qd_device_traits_find(c->device);
    QD_TRY(qd_lora_check(c));
    QD_TRY(qd_fp8_resolve(o, c));
    QD_TRY(qd_faults_resolve(o, c));
    c->kernels = qd_options_enum(o, "run.kernels") == 0 ? NULL : qd_options_string(o, "run.kernels");
    if (c->kernels && strcmp(c->device, "cpu") != 0)
        return QD_FAIL(QD_USAGE, "run.kernels=%s chooses kernels of the CPU: it needs run.device=cpu", c->kernels);
    c->gpu = (int)qd_options_int(o, "run.gpu");
    c->tuning = qd_options_string(o, "run.tuning");
    c->collectives = qd_options_string(o, "run.collectives");
    c->tuning_seconds = qd_options_float(o, "run.tuning_seconds");
    c->deterministic = qd_options_bool(o, "train.deterministic");
    c->backend = qd_options_string(o, "run.backend");
    if (strcmp(c->backend, "nccl") == 0 && strcmp(c->device, "cuda") != 0)
        return QD_FAIL(QD_USAGE, "run.backend=nccl moves GPU memory: it needs run.device=cuda");
    c->ranks_as_threads = qd_options_enum(o, "run.ranks_as") == 1;
    c->threads = (int)qd_options_int(o, "run.threads");
    c->deadline = qd_options_float(o, "run.deadline");
    c->log_every = qd_options_int(o, "run.log_every");
    c->samples = (qd_sample_config){.every = qd_options_int(o, "run.sample_every"), .prompts = qd_options_string(o, "run.sample_prompts"),
                                    .tokens = qd_options_int(o, "run.sample_tokens"),
                                    .temperature = qd_options_float(o, "run.sample_temperature")};
    if (c->samples.every == 0 && c->samples.prompts[0] != '\0')
        return QD_FAIL(QD_USAGE, "run.sample_prompts has no effect without run.sample_every: set that, or remove it");
    c->tensorboard = qd_options_bool(o, "run.tensorboard");
    c->csv = qd_options_bool(o, "run.csv");
    c->trace = qd_options_bool(o, "run.trace");
    c->trace_steps = qd_options_int(o, "run.trace_steps");
    static const struct {
        const char *key, *what;
    } needs_folder[] = {{"run.trace", "the folder that trace.json is written to"},
                        {"run.tensorboard", "the folder that event files are written to"},
                        {"run.csv", "the folder that metrics.csv is written to"},
                        {"run.sample_every", "the folder that samples.jsonl is written to"},
                        {"run.save_every", "the folder that checkpoints are written to"},
                        {"run.restarts", "the folder that the run restarts from"},
                        {"run.resume", "the folder of the run to resume"}};
    const bool wanted[] = {c->trace, c->tensorboard, c->csv, c->samples.every > 0, c->save_every > 0, c->restarts > 0, c->resume};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (wanted[i] && c->run_dir[0] == '\0')
            return QD_FAIL(QD_USAGE, "%s needs run.dir, %s", needs_folder[i].key, needs_folder[i].what);
    return QD_OK;
}

bool qd_config_snapshot(const qd_config *c)
{
    return c->save_every > 0 && c->async_save;
}
