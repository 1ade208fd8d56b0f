/*
 * What all kernels share: SIMD registers as vectors, OpenMP's threads, and a few formulas.
 *
 * Plain C with GCC's vector extensions, float32, no library: gcc and clang build it for every target of build.py, once
 * per variant of the processor. Elsewhere torch computes the same, more slowly.
 *
 * A variant's flags set (build.py has the numbers):
 *   LANES       float32 numbers in a register
 *   WIDE, TILE  a product of few rows holds the sums of TILE rows by WIDE registers of columns in registers
 *   LORA_ROWS, LORA_RANKS  the same for the thin products of LoRA
 */

#define JOIN(a, b, c) a##b##c
#define NAMED(a, b, c) JOIN(a, b, c)
#define NAME(function) NAMED(function, _, VARIANT)

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int ints __attribute__((vector_size(4 * LANES), aligned(4)));

/* OpenMP as GCC calls it: pointers into the library that torch has loaded. `use_threads` sets them, before any kernel. */
#define HIDDEN __attribute__((visibility("hidden")))
#define in_parallel NAME(in_parallel)
#define thread_number NAME(thread_number)
#define thread_count NAME(thread_count)
extern HIDDEN void (*in_parallel)(void (*)(void *), void *, unsigned, unsigned);
extern HIDDEN int (*thread_number)(void);
extern HIDDEN int (*thread_count)(void);

#define INLINE static inline __attribute__((always_inline))

/* Tells the processor that this thread waits for another one. */
#if defined(__x86_64__)
#define wait_a_moment() __builtin_ia32_pause()
#else
#define wait_a_moment() __asm__ volatile("yield")
#endif

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }

INLINE float sum(vec value) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += value[lane];
    return total;
}

/* Lane by lane: `a` where the mask is set, else `b`. */
INLINE vec pick(ints mask, vec a, vec b) { return (vec)((mask & (ints)a) | (~mask & (ints)b)); }

/* e to the power of x, to 2 units in the last place; 0 far below, infinity far above, NaN for NaN. */
INLINE vec exponential(vec x) {
    const float magic = 12582912.0f; /* 1.5·2^23: adding it leaves no bit for a fraction, so it rounds to a whole number */
    vec shifted = x * 1.44269504088896341f + magic, whole = shifted - magic;
    vec rest = x - whole * 0.693145751953125f - whole * 1.42860677e-6f;
    vec power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    ints two = ((ints)shifted - (ints)((vec){0} + magic) + 127) << 23;
    vec result = power * (vec)two;
    result = pick(x < -87.0f, (vec){0}, result);
    result = pick(x > 88.0f, (vec){0} + __builtin_inff(), result);
    return pick(x != x, x, result);
}

/* Rotate one head by its position (RoPE), in place; the sign -1 rotates back. */
INLINE void rope_head(float *head, const float *cosine, const float *sine, long half, const float sign) {
    for (long at = 0; at < half; at++) {
        const float left = head[at], right = head[half + at];
        head[at] = left * cosine[at] - sign * right * sine[at];
        head[half + at] = right * cosine[at] + sign * left * sine[at];
    }
}

INLINE float dot(const float *a, const float *b, long width) {
    vec products = {0};
    long at = 0;
    for (; at + LANES <= width; at += LANES) products += load(a + at) * load(b + at);
    float total = sum(products);
    for (; at < width; at++) total += a[at] * b[at];
    return total;
}
