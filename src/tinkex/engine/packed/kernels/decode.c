/*
 * The parts of a decode step for which torch has no fast call: products of a few rows with a large matrix, with LoRA on
 * top, and attention to a cache. A row's numbers never depend on the rows beside it. All sums of a tile stay in registers.
 */

#include "kernels.h"

#define PANEL (WIDE * LANES)
/* Weights are prefetched this many steps before they are used: the processor's own prefetcher reads half as fast. */
#define AHEAD 24
/* Tokens whose scores are held at a time, and the widest head. */
#define BLOCK 64
#define WIDEST 512

const int NAME(panel) = PANEL;
const int NAME(lanes) = LANES;
const int NAME(widest) = WIDEST;
const char NAME(digest)[] = DIGEST; /* of all sources and of build.py */

void (*in_parallel)(void (*)(void *), void *, unsigned, unsigned);
int (*thread_number)(void);
int (*thread_count)(void);

void NAME(use_threads)(void *parallel, void *number, void *count) {
    in_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    thread_number = (int (*)(void))number;
    thread_count = (int (*)(void))count;
}

/* LoRA: y += x·Aᵀ·Bᵀ, each row with its own adapter, after a product or alone. The A and B of sites that share an input
 * are stacked, so that a group of sites is one pair. */

struct decode_lora {
    const float *x; /* [rows, in] */
    float *y; /* [rows, out] */
    float *low; /* [rows, ranks]: x·Aᵀ */
    const float *down; /* A: [adapters, ranks, in] */
    const float *up; /* s·B: [adapters, ranks, out]; a site's ranks are zero outside its own columns */
    const long *order, *starts; /* row numbers, adapter after adapter, and where each adapter's begin */
    const long *columns; /* of each site: its first column and the one after its last */
    long adapters, sites, rank, in, out;
};

/* low = x·Aᵀ; each thread takes some of the ranks. */
static void shrink(const struct decode_lora *job, long me, long all) {
    const long ranks = job->sites * job->rank, items = job->adapters * ranks, in = job->in;
    for (long item = items * me / all; item < items * (me + 1) / all; item++) {
        const float *down = job->down + item * in;
        for (long at = job->starts[item / ranks]; at < job->starts[item / ranks + 1]; at++) {
            const float *x = job->x + job->order[at] * in;
            job->low[job->order[at] * ranks + item % ranks] = dot(x, down, in);
        }
    }
}

/* y += low·Bᵀ for the columns from `first` to `last`: each thread takes some of the columns. */
static void grow(const struct decode_lora *job, long first, long last) {
    const long ranks = job->sites * job->rank, items = job->adapters * ranks, out = job->out;
    for (long item = 0; item < items; item++) {
        const long *columns = job->columns + 2 * (item % ranks / job->rank);
        const long start = columns[0] > first ? columns[0] : first, stop = columns[1] < last ? columns[1] : last;
        const float *up = job->up + item * out;
        for (long index = job->starts[item / ranks]; index < job->starts[item / ranks + 1]; index++) {
            float *y = job->y + job->order[index] * out;
            const float factor = job->low[job->order[index] * ranks + item % ranks];
            for (long at = start; at < stop; at++) y[at] += factor * up[at];
        }
    }
}

/* Products: y = x·Wᵀ + bias + residual, and LoRA. The weight is stored in panels of PANEL columns, [panels][in][PANEL]. */

struct product {
    const float *x, *weight, *bias, *residual;
    float *y;
    long rows, out, in;
    const struct decode_lora *lora;
    long ready; /* threads that have finished their part of x·Aᵀ */
};

/* Write the sums of some columns of a row; the last panel may reach over the edge. */
INLINE void finish(const struct product *job, vec sums, long row, long column) {
    const long at = row * job->out + column, left = job->out - column;
    if (left >= LANES) {
        if (job->bias) sums += load(job->bias + column);
        if (job->residual) sums += load(job->residual + at);
        store(job->y + at, sums);
        return;
    }
    float last[LANES];
    store(last, sums);
    for (long lane = 0; lane < left; lane++) {
        if (job->bias) last[lane] += job->bias[column + lane];
        if (job->residual) last[lane] += job->residual[at + lane];
        job->y[at + lane] = last[lane];
    }
}

INLINE void tile(const struct product *job, const float *weight, long column, long first, const int rows) {
    const long in = job->in;
    const float *x = job->x + first * in;
    vec sums[TILE][WIDE];
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < WIDE; part++) sums[row][part] = (vec){0};
    for (long k = 0; k < in; k++) {
        vec columns[WIDE];
        for (int part = 0; part < WIDE; part++) {
            const float *at = weight + k * PANEL + part * LANES;
            columns[part] = load(at);
            __builtin_prefetch(at + AHEAD * PANEL);
        }
        for (int row = 0; row < rows; row++) {
            const float factor = x[row * in + k];
            for (int part = 0; part < WIDE; part++) sums[row][part] += factor * columns[part];
        }
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < WIDE; part++) finish(job, sums[row][part], first + row, column + part * LANES);
}

static void multiply(void *argument) {
    struct product *job = argument;
    const long panels = (job->out + PANEL - 1) / PANEL, me = thread_number(), all = thread_count();
    const long start = panels * me / all, stop = panels * (me + 1) / all;
    if (job->lora) {
        shrink(job->lora, me, all);
        __atomic_fetch_add(&job->ready, 1, __ATOMIC_RELEASE);
    }
    for (long panel = start; panel < stop && job->weight; panel++) {
        const float *weight = job->weight + panel * PANEL * job->in;
        const long column = panel * PANEL;
        long first = 0;
        for (; first + TILE <= job->rows; first += TILE) tile(job, weight, column, first, TILE);
        switch (job->rows - first) {
#define REST(count) case count: if (count < TILE) tile(job, weight, column, first, count < TILE ? count : 1); break;
            REST(1) REST(2) REST(3) REST(4) REST(5) REST(6) REST(7) REST(8) REST(9) REST(10) REST(11)
        }
    }
    if (job->lora) {
        /* The other threads did their part before their products, so this hardly ever waits. */
        while (__atomic_load_n(&job->ready, __ATOMIC_ACQUIRE) < all) wait_a_moment();
        const long last = stop * PANEL < job->out ? stop * PANEL : job->out;
        grow(job->lora, start * PANEL, last);
    }
}

void NAME(linear)(const float *x, const float *weight, const float *bias, const float *residual, float *y, long rows,
                  long out, long in, const struct decode_lora *lora, long threads) {
    struct product job = {x, weight, bias, residual, y, rows, out, in, lora, 0};
    in_parallel(multiply, &job, (unsigned)threads, 0);
}

/* LoRA alone. */
void NAME(lora_decode)(const struct decode_lora *lora, long threads) {
    struct product job = {0, 0, 0, 0, 0, 0, lora->out, 0, lora, 0};
    in_parallel(multiply, &job, (unsigned)threads, 0);
}

/* Attention of one new token per row: rotate it by its position, write it into the cache, attend to what is there. */

struct attention {
    float *qkv; /* [rows, heads + 2·key_heads, width], rotated in place */
    const float *cosine, *sine; /* [rows, width / 2] */
    float *keys, *values; /* [rows, key_heads, columns, width] */
    const long *lengths; /* of each row: its tokens in the cache before this one, right-aligned */
    float *out; /* [rows, heads, width] */
    float *largest, *sum_exp; /* [rows, heads]: the largest score, and the sum of exp(score − largest) */
    long rows, heads, key_heads, width, columns, column;
    float scale;
};

/* Attention of one query to `count` keys, block by block with a running maximum (the online softmax). */
INLINE void attend_query(const struct attention *job, const float *query, const float *keys, const float *values,
                         long count, float *out, float *largest_score, float *sum_exp) {
    const long width = job->width;
    float result[WIDEST];
    for (long at = 0; at < width; at++) result[at] = 0;
    float largest = -__builtin_inff();
    vec totals = {0};
    for (long start = 0; start < count; start += BLOCK) {
        const long size = count - start < BLOCK ? count - start : BLOCK;
        float scores[BLOCK], before = largest;
        for (long token = 0; token < size; token++) {
            const float *key = keys + (start + token) * width;
            vec products = {0};
            for (long at = 0; at < width; at += LANES) products += load(query + at) * load(key + at);
            scores[token] = sum(products) * job->scale;
            largest = scores[token] > largest ? scores[token] : largest;
        }
        /* All scores so far are -infinity: their shares would be 0 / 0. */
        if (largest == -__builtin_inff() && scores[0] == scores[0]) continue;
        for (long token = size; token < BLOCK; token++) scores[token] = -__builtin_inff();
        const vec faded = exponential((vec){0} + (before - largest));
        totals *= faded;
        for (long at = 0; at < width; at += LANES) store(result + at, load(result + at) * faded);
        for (long token = 0; token < BLOCK; token += LANES) {
            const vec share = exponential(load(scores + token) - largest);
            store(scores + token, share);
            totals += share;
        }
        for (long token = 0; token < size; token++) {
            const float *value = values + (start + token) * width;
            for (long at = 0; at < width; at += LANES)
                store(result + at, load(result + at) + scores[token] * load(value + at));
        }
    }
    *largest_score = largest;
    *sum_exp = sum(totals);
    const vec share = (vec){0} + 1.0f / *sum_exp;
    for (long at = 0; at < width; at += LANES) store(out + at, load(result + at) * share);
}

static void thread_attend(void *argument) {
    const struct attention *job = argument;
    const long width = job->width, group = job->heads / job->key_heads, items = job->rows * job->key_heads;
    const long me = thread_number(), all = thread_count();
    for (long item = items * me / all; item < items * (me + 1) / all; item++) {
        const long row = item / job->key_heads, key_head = item % job->key_heads;
        const float *cosine = job->cosine + row * width / 2, *sine = job->sine + row * width / 2;
        float *heads = job->qkv + row * (job->heads + 2 * job->key_heads) * width;
        float *key = heads + (job->heads + key_head) * width, *value = key + job->key_heads * width;
        float *keys = job->keys + item * job->columns * width, *values = job->values + item * job->columns * width;
        rope_head(key, cosine, sine, width / 2, 1.0f);
        for (long at = 0; at < width; at++) {
            keys[job->column * width + at] = key[at];
            values[job->column * width + at] = value[at];
        }
        const long first = (job->column - job->lengths[row]) * width;
        for (long head = key_head * group; head < (key_head + 1) * group; head++) {
            const long index = row * job->heads + head;
            rope_head(heads + head * width, cosine, sine, width / 2, 1.0f);
            attend_query(job, heads + head * width, keys + first, values + first, job->lengths[row] + 1,
                         job->out + index * width, job->largest + index, job->sum_exp + index);
        }
    }
}

void NAME(attend)(const struct attention *job, long threads) {
    in_parallel(thread_attend, (void *)job, (unsigned)threads, 0);
}
