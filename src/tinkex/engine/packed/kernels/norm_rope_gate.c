/*
 * Elementwise operations between the matrix products of a layer, forward and backward: RMSNorm, RoPE and SwiGLU.
 * Rows are independent: neither the rows beside a row nor the number of threads change its numbers.
 */

#include "kernels.h"

struct rows {
    const float *x, *gain, *dy, *residual, *cosine, *sine;
    float *y;
    long rows, width, stride, heads;
    float eps, sign;
    void (*compute)(const struct rows *, long row);
};

static void thread_rows(void *argument) {
    const struct rows *job = argument;
    const long me = thread_number(), all = thread_count();
    for (long row = job->rows * me / all; row < job->rows * (me + 1) / all; row++) job->compute(job, row);
}

static void all_rows(struct rows job, long threads) {
    if (threads > 1) in_parallel(thread_rows, &job, (unsigned)threads, 0);
    else
        for (long row = 0; row < job.rows; row++) job.compute(&job, row);
}

INLINE float norm_scale(const struct rows *job, const float *x) {
    return 1.0f / __builtin_sqrtf(dot(x, x, job->width) / (float)job->width + job->eps);
}

static void rmsnorm_row(const struct rows *job, long row) {
    const float *x = job->x + row * job->width, scale = norm_scale(job, x);
    float *y = job->y + row * job->width;
    for (long at = 0; at < job->width; at++) y[at] = x[at] * scale * job->gain[at];
}

/* y = gain·x / sqrt(mean(x²) + eps), row by row. */
void NAME(rmsnorm)(const float *x, const float *gain, float eps, float *y, long rows, long width, long threads) {
    all_rows((struct rows){.x = x, .gain = gain, .eps = eps, .y = y, .rows = rows, .width = width,
                           .compute = rmsnorm_row},
             threads);
}

static void rmsnorm_backward_row(const struct rows *job, long row) {
    const long width = job->width;
    const float *x = job->x + row * width, *dy = job->dy + row * width, *gain = job->gain;
    float *dx = job->y + row * width;
    vec products = {0};
    long at = 0;
    for (; at + LANES <= width; at += LANES) products += load(x + at) * load(gain + at) * load(dy + at);
    float total = sum(products);
    for (; at < width; at++) total += x[at] * gain[at] * dy[at];
    const float scale = norm_scale(job, x), back = total / (float)width * scale * scale * scale;
    if (job->residual)
        for (at = 0; at < width; at++)
            dx[at] = gain[at] * dy[at] * scale - x[at] * back + job->residual[row * width + at];
    else
        for (at = 0; at < width; at++) dx[at] = gain[at] * dy[at] * scale - x[at] * back;
}

/* dx = r·(gain·dy − x·r²·mean(gain·dy·x)) + residual, with r = 1 / sqrt(mean(x²) + eps).
 * `dx` may be `dy`; `residual` may be null. */
void NAME(rmsnorm_backward)(const float *x, const float *gain, float eps, const float *dy, const float *residual,
                            float *dx, long rows, long width, long threads) {
    all_rows((struct rows){.x = x, .gain = gain, .eps = eps, .dy = dy, .residual = residual, .y = dx, .rows = rows,
                           .width = width, .compute = rmsnorm_backward_row},
             threads);
}

static void rope_row(const struct rows *job, long row) {
    const long half = job->width / 2;
    for (long head = 0; head < job->heads; head++)
        rope_head(job->y + row * job->stride + head * job->width, job->cosine + row * half, job->sine + row * half,
                  half, job->sign);
}

/* Rotate the first `heads` heads of every row by the row's position, in place; the sign -1 rotates back. */
void NAME(rope)(float *qkv, const float *cosine, const float *sine, float sign, long rows, long heads, long width,
                long stride, long threads) {
    all_rows((struct rows){.y = qkv, .cosine = cosine, .sine = sine, .sign = sign, .rows = rows, .heads = heads,
                           .width = width, .stride = stride, .compute = rope_row},
             threads);
}

static void swiglu_row(const struct rows *job, long row) {
    const float *gate = job->x + row * 2 * job->width, *up = gate + job->width;
    float *y = job->y + row * job->width;
    for (long at = 0; at < job->width; at += LANES) {
        const vec value = load(gate + at);
        store(y + at, value / (1.0f + exponential(-value)) * load(up + at));
    }
}

/* silu(gate)·up, with gate and up side by side [rows, 2·width]. `width` is a whole number of registers. */
void NAME(swiglu)(const float *gate_up, float *y, long rows, long width, long threads) {
    all_rows((struct rows){.x = gate_up, .y = y, .rows = rows, .width = width, .compute = swiglu_row}, threads);
}

static void swiglu_backward_row(const struct rows *job, long row) {
    const long width = job->width;
    const float *gate = job->x + row * 2 * width, *up = gate + width, *dy = job->dy + row * width;
    float *dx = job->y + row * 2 * width;
    for (long at = 0; at < width; at += LANES) {
        const vec value = load(gate + at), d = load(dy + at);
        const vec sigmoid = 1.0f / (1.0f + exponential(-value)), silu = value * sigmoid;
        store(dx + at, d * load(up + at) * (sigmoid + silu * (1.0f - sigmoid)));
        store(dx + width + at, d * silu);
    }
}

/* The gradients of gate and up, side by side, from that of silu(gate)·up. */
void NAME(swiglu_backward)(const float *gate_up, const float *dy, float *dx, long rows, long width, long threads) {
    all_rows((struct rows){.x = gate_up, .dy = dy, .y = dx, .rows = rows, .width = width,
                           .compute = swiglu_backward_row},
             threads);
}
