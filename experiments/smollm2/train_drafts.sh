#!/bin/sh
# Every draft of drafts/, trained anew from the text of data/ and tasks/:
#
#   sh experiments/smollm2/train_drafts.sh            # or make drafts
#   RUNTIME=cuda_bfloat16 sh experiments/smollm2/train_drafts.sh train.seed=1
#
# Each was trained in stages: on data/ alone, then on tasks/ too, of which there were 27 shards then; eagle3 and exit_adapter
# then smaller, and with mtp on ten shards of each text, which is what there was time for; eagle3 and exit_adapter once more
# on 22 of each. eagle3, hydra and independent then on all there was, requests/ included (6 of its 33 shards were there), and
# on tasks/ and all of requests/; last, every draft on those two with a loss that is acceptance itself where drafts are accepted
# (lk_hybrid). A stage begins with the weights of the one before it.
# Killed at any point, the same command goes on; what is finished is not trained again. What is given here goes to every
# stage; OUT is where the drafts go.
set -eu

PYTHON=${PYTHON:-python}
OUT=${OUT:-outputs/drafts}
text=experiments/smollm2
both="data=[$text/data,$text/tasks]"
all="data=[$text/data,$text/tasks,$text/requests]"
later="data=[$text/tasks,$text/requests]"
more="$*"

stage() { # its folder, the kind of draft, and its own settings
    folder=$OUT/$1 kind=$2
    shift 2
    # shellcheck disable=SC2086  # $more is a list of words
    "$PYTHON" experiments/train.py "drafter=$kind" "out=$folder" "runtime=${RUNTIME:-fastest}" \
        "+draft.draft_vocab=$text/data/draft_vocab.safetensors" +draft.d_vocab=8192 "$@" $more
}

# What the target sees, in one pass for all drafts; the text is there.
observe() {
    "$PYTHON" experiments/make_data.py "runtime=${RUNTIME:-fastest}" "observe_layers=[2,15,27,30]" "$@"
}
observe "out=$text/data" data.answer_tokens=350000
observe "out=$text/tasks" "passages.data=$text/data" passages.count=4600 data.answer_tokens=380000 \
    data.max_sequence_tokens=448 data.max_new_tokens=128
observe "out=$text/requests" openers=people data.seed=1 data.max_new_tokens=144 data.answer_tokens=485000

stage first/eagle3 eagle3 "data=$text/data" train.steps=2600 train.learning_rate=2.5e-3
stage first/hydra hydra "data=$text/data" +draft.num_heads=2 train.steps=1600 train.learning_rate=1.5e-3 \
    train.warmup_steps=50 train.validate_every=200
stage first/mtp mtp "data=$text/data" train.steps=2000 train.learning_rate=2.5e-3
stage first/medusa medusa "data=$text/data" train.steps=1400 train.learning_rate=3e-3 train.warmup_steps=50 \
    train.validate_every=200
stage first/independent independent "data=$text/data" +draft.hidden_size=256 +draft.intermediate_size=640 \
    train.steps=2000 train.learning_rate=2e-3
stage first/exit_adapter exit_adapter "$both" data_shards=27 +draft.exit_layer=2 train.steps=1100 train.learning_rate=2e-3

stage both/eagle3 eagle3 "$both" data_shards=27 "train.begin_with=$OUT/first/eagle3" train.steps=4000 train.learning_rate=2e-3
stage both/exit_adapter exit_adapter "$both" data_shards=27 "train.begin_with=$OUT/first/exit_adapter" \
    +draft.exit_layer=2 train.steps=2000 train.learning_rate=1.5e-3

stage small/eagle3 eagle3 "$both" data_shards=10 "train.begin_with=$OUT/both/eagle3" +draft.own_head=false \
    +draft.intermediate_size=1152 train.steps=1600 train.learning_rate=7e-4
stage wider/eagle3 eagle3 "$both" data_shards=22 "train.begin_with=$OUT/small/eagle3" +draft.own_head=false \
    +draft.intermediate_size=1152 train.steps=1400 train.learning_rate=5e-4
stage people/eagle3 eagle3 "$all" "train.begin_with=$OUT/wider/eagle3" +draft.own_head=false +draft.intermediate_size=1152 \
    train.steps=1500 train.learning_rate=5e-4
stage requests/eagle3 eagle3 "$later" "train.begin_with=$OUT/people/eagle3" +draft.own_head=false \
    +draft.intermediate_size=1152 train.steps=1200 train.learning_rate=5e-4
stage eagle3 eagle3 "$later" "train.begin_with=$OUT/requests/eagle3" +draft.own_head=false +draft.intermediate_size=1152 \
    train.loss=lk_hybrid train.steps=1200 train.learning_rate=3e-4
stage small/exit_adapter exit_adapter "$both" data_shards=10 "train.begin_with=$OUT/both/exit_adapter" \
    +draft.exit_layer=2 +draft.feed_forward=false train.steps=1000 train.learning_rate=1.5e-3
stage smaller/exit_adapter exit_adapter "$both" data_shards=10 "train.begin_with=$OUT/small/exit_adapter" \
    +draft.exit_layer=2 +draft.feed_forward=false train.steps=800 train.learning_rate=1e-3
stage wider/exit_adapter exit_adapter "$both" data_shards=22 "train.begin_with=$OUT/smaller/exit_adapter" \
    +draft.exit_layer=2 +draft.feed_forward=false train.steps=1200 train.learning_rate=7e-4
stage exit_adapter exit_adapter "$later" "train.begin_with=$OUT/wider/exit_adapter" +draft.exit_layer=2 \
    +draft.feed_forward=false train.loss=lk_hybrid train.steps=1000 train.learning_rate=3e-4
stage both/mtp mtp "$both" data_shards=10 "train.begin_with=$OUT/first/mtp" train.steps=1000 train.learning_rate=1e-3
stage mtp mtp "$later" "train.begin_with=$OUT/both/mtp" train.loss=lk_hybrid train.steps=800 train.learning_rate=5e-4
stage both/hydra hydra "$both" data_shards=27 "train.begin_with=$OUT/first/hydra" +draft.num_heads=2 train.steps=4000 \
    train.learning_rate=2e-3
stage people/hydra hydra "$all" "train.begin_with=$OUT/both/hydra" +draft.num_heads=2 train.steps=3000 \
    train.learning_rate=7e-4
stage requests/hydra hydra "$later" "train.begin_with=$OUT/people/hydra" +draft.num_heads=2 train.steps=1600 \
    train.learning_rate=7e-4
stage hydra hydra "$later" "train.begin_with=$OUT/requests/hydra" +draft.num_heads=2 train.loss=lk_hybrid train.steps=1600 \
    train.learning_rate=2e-4
stage both/medusa medusa "$both" data_shards=27 "train.begin_with=$OUT/first/medusa" train.steps=600 \
    train.learning_rate=1.5e-3
stage medusa medusa "$later" "train.begin_with=$OUT/both/medusa" train.loss=lk_hybrid train.steps=600 \
    train.learning_rate=5e-4
stage both/independent independent "$both" data_shards=27 "train.begin_with=$OUT/first/independent" \
    +draft.hidden_size=256 +draft.intermediate_size=640 train.steps=1200 train.learning_rate=1.5e-3
stage people/independent independent "$all" "train.begin_with=$OUT/both/independent" +draft.hidden_size=256 \
    +draft.intermediate_size=640 train.steps=1700 train.learning_rate=7e-4
stage requests/independent independent "$later" "train.begin_with=$OUT/people/independent" +draft.hidden_size=256 \
    +draft.intermediate_size=640 train.steps=1400 train.learning_rate=7e-4
stage independent independent "$later" "train.begin_with=$OUT/requests/independent" +draft.hidden_size=256 \
    +draft.intermediate_size=640 train.loss=lk_hybrid train.steps=1200 train.learning_rate=3e-4
stage layerskip layerskip "data=$text/data" +draft.exit_layer=8 "+draft.exits=[4,6,8,12]" +draft.rotation=2 \
    +draft.lora_rank_below=24 +draft.lora_rank=4 "+draft.validate_exits=[4,6,12]"
