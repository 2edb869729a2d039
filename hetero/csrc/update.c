/* One update of an fp32 master from a gradient, in one pass over memory.
 *
 * hetero/train/update/formulas.py holds the same arithmetic in torch operations, and the two must agree bit
 * for bit: every operation is IEEE binary32, rounded to nearest by itself, in the order written here.
 * So this file is compiled without contraction to fused multiply-adds and without fast-math (the
 * flags are in hatch_build.py). A vector lane computes what a scalar does: the instruction set is
 * free, and chosen when the library is loaded.
 *
 * A rule is a function of one element, and LOOPS makes it loops over a run, one for each way in which
 * master and gradient are stored. A loop reads and writes everything once, so that memory works while
 * the divisions are computed: in phases over blocks, AdamW took 1.1 to 1.3 times as long. Nothing in
 * it may branch, or it would not vectorise: a flag selects, and where it would cost arithmetic or a
 * state there are two rules. What is seldom (a gradient of the other 16-bit type, weight decay that
 * joins the gradient) happens before the loop, on gradients made fp32 in blocks that stay in L1.
 *
 * For a CUDA device the same functions are compiled by NVRTC (hetero/device/nvrtc.py), as C++ and without
 * any header: what differs is between __CUDACC__ and its #endif. There KERNEL makes of a rule the kernel of
 * one layout and one kind of gradient, and a line with it is added to this text when it is first needed.
 *
 * Master layouts:
 *   split (bf16)  master bits = (hi << 16) + lo, with hi the working weight and lo signed: hi is the
 *                 master rounded to nearest, ties away from zero; NaN is hi 0x7fc0, lo 0
 *   whole (fp16)  lo is the master, and hi, the working weight, is it rounded to nearest, ties to even
 */
#ifdef __CUDACC__
#ifdef __CUDACC_RTC__
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
#endif
#define restrict __restrict__
#define INLINE static __device__ __forceinline__
#else
#include <math.h>
#include <stdint.h>
#include <string.h>
#define INLINE static inline
#endif

#ifdef __FAST_MATH__
#error "the arithmetic of this file is IEEE: compile it without -ffast-math"
#endif

/* Where the loader cannot choose among clones (musl, macOS, aarch64), the plain build is right too. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(HETERO_PLAIN)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { ABI = 3, BLOCK = 1024 };
enum layout { SPLIT = 0, WHOLE = 1 };
enum grad_kind { BFLOAT16 = 0, FLOAT16 = 1, FLOAT32 = 2 };

/* -- numbers --------------------------------------------------------------------------------- */

#ifdef __CUDACC__
INLINE float from_bits(uint32_t bits) { return __uint_as_float(bits); }

INLINE uint32_t to_bits(float value) { return __float_as_uint(value); }
#else
INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
#endif

INLINE float from_bfloat(uint16_t half) { return from_bits((uint32_t)half << 16); }

INLINE float from_float(float value) { return value; }

/* Return an fp16 as a float: selections rather than branches, so that it vectorises without F16C. */
INLINE float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    uint32_t tiny = to_bits((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t bits = (magnitude << 13) + (magnitude >= 0x7c00u ? 224u << 23 : 112u << 23);
    return from_bits(sign | (magnitude < 0x400u ? tiny : bits));
}

/* Return a float as fp16, to nearest, ties to even; every NaN becomes 0x7e00 with its sign. */
INLINE uint16_t to_half(float value) {
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    /* adding 0.5 aligns the bits to 2^-24, the smallest fp16, and rounds them on the way */
    uint32_t tiny = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
    uint32_t half = magnitude < 113u << 23 ? tiny : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (uint16_t)(sign | half);
}

/* -- masters --------------------------------------------------------------------------------- */

INLINE float split_load(uint16_t hi, int16_t lo) {
    return from_bits(((uint32_t)hi << 16) + (uint32_t)(int32_t)lo);
}

INLINE void split_store(uint16_t *hi, int16_t *lo, float p) {
    uint32_t bits = to_bits(p);
    bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
    *hi = (uint16_t)((bits + 0x8000u) >> 16);
    *lo = (int16_t)bits; /* bits - (hi << 16) fits, so it is the low half, read as signed */
}

INLINE float whole_load(uint16_t hi, float lo) {
    (void)hi;
    return lo;
}

INLINE void whole_store(uint16_t *hi, float *lo, float p) {
    *hi = to_half(p);
    *lo = p;
}

/* -- what the rules share -------------------------------------------------------------------- */

/* Return a + w * (b - a), or b - (b - a) * (1 - w) where w >= 1/2: k is w or -(1 - w). */
INLINE float lerp(float a, float b, float k, float far) {
    return (far != 0.0f ? b : a) + k * (b - a);
}

/* Return a running mean of squares after one more of them. */
INLINE float mean_square(float mean, float x, float keep, float rest) {
    return mean * keep + (rest * x) * x;
}

INLINE float maximum(float a, float b) { /* NaN wins, as in torch.maximum */
    return a != a || a > b ? a : b;
}

INLINE float sign(float x) { return (float)((x > 0.0f) - (x < 0.0f)); }

/* -- the rules: formulas.py names the same coefficients in the same order --------------------- */

/* Return p after one update by gradient g. s0, s1 and s2 are the element's states in torch's order;
 * those that the rule does not keep must not be touched. */
#define RULE(name)                                                                                 \
    INLINE float name(float p, float g, float *restrict s0, float *restrict s1,                    \
                      float *restrict s2, const float *restrict c)

RULE(sgd) {
    float minus_lr = c[0];
    (void)s0, (void)s1, (void)s2;
    return p + minus_lr * g;
}

RULE(sgd_momentum) {
    float minus_lr = c[0], momentum = c[1], rest = c[2], nesterov = c[3], fresh = c[4];
    float buffer = *s0 = fresh != 0.0f ? g : *s0 * momentum + rest * g;
    (void)s1, (void)s2;
    return p + minus_lr * (nesterov != 0.0f ? g + momentum * buffer : buffer);
}

RULE(adam) {
    float k = c[0], far = c[1], beta2 = c[2], rest2 = c[3], root = c[4], eps = c[5], minus_step = c[6];
    float mean = *s0 = lerp(*s0, g, k, far);
    float square = *s1 = mean_square(*s1, g, beta2, rest2);
    (void)s2;
    return p + (minus_step * mean) / (sqrtf(square) / root + eps);
}

RULE(adam_amsgrad) {
    float k = c[0], far = c[1], beta2 = c[2], rest2 = c[3], root = c[4], eps = c[5], minus_step = c[6];
    float mean = *s0 = lerp(*s0, g, k, far);
    float square = *s1 = mean_square(*s1, g, beta2, rest2);
    float largest = *s2 = maximum(*s2, square);
    return p + (minus_step * mean) / (sqrtf(largest) / root + eps);
}

RULE(nadam) {
    float k = c[0], far = c[1], beta2 = c[2], rest2 = c[3], correction2 = c[4], eps = c[5];
    float minus_step_g = c[6], minus_step_m = c[7];
    float mean = *s0 = lerp(*s0, g, k, far);
    float square = *s1 = mean_square(*s1, g, beta2, rest2);
    float denominator = sqrtf(square / correction2) + eps;
    (void)s2;
    return p + (minus_step_g * g) / denominator + (minus_step_m * mean) / denominator;
}

RULE(radam) {
    float k = c[0], far = c[1], beta2 = c[2], rest2 = c[3], correction1 = c[4], lr = c[5], eps = c[6];
    float root = c[7], rectified = c[8], rect = c[9];
    float mean = *s0 = lerp(*s0, g, k, far);
    float square = *s1 = mean_square(*s1, g, beta2, rest2);
    float update = mean / correction1 * lr;
    float adaptive = (1.0f / (sqrtf(square) + eps)) * root;
    (void)s2;
    return p - (rectified != 0.0f ? update * adaptive * rect : update);
}

RULE(adamax) {
    float k = c[0], far = c[1], beta2 = c[2], eps = c[3], minus_step = c[4];
    float mean = *s0 = lerp(*s0, g, k, far);
    float largest = *s1 = maximum(*s1 * beta2, fabsf(g) + eps);
    (void)s2;
    return p + (minus_step * mean) / largest;
}

RULE(adagrad) {
    float eps = c[0], minus_lr = c[1];
    float sum = *s0 = *s0 + g * g;
    (void)s1, (void)s2;
    return p + (minus_lr * g) / (sqrtf(sum) + eps);
}

RULE(adadelta) {
    float rho = c[0], rest = c[1], eps = c[2], minus_lr = c[3];
    float square = *s0 = mean_square(*s0, g, rho, rest);
    float delta = sqrtf(*s1 + eps) / sqrtf(square + eps) * g;
    *s1 = mean_square(*s1, delta, rho, rest);
    (void)s2;
    return p + minus_lr * delta;
}

RULE(rmsprop) {
    float minus_lr = c[0], alpha = c[1], rest = c[2], eps = c[3];
    float square = *s0 = mean_square(*s0, g, alpha, rest);
    (void)s1, (void)s2;
    return p + (minus_lr * g) / (sqrtf(square) + eps);
}

RULE(rmsprop_momentum) {
    float minus_lr = c[0], alpha = c[1], rest = c[2], eps = c[3], momentum = c[4];
    float square = *s0 = mean_square(*s0, g, alpha, rest);
    float buffer = *s1 = *s1 * momentum + g / (sqrtf(square) + eps);
    (void)s2;
    return p + minus_lr * buffer;
}

RULE(rmsprop_centered) {
    float minus_lr = c[0], alpha = c[1], rest = c[2], eps = c[3], k = c[5], far = c[6];
    float square = *s0 = mean_square(*s0, g, alpha, rest);
    float mean = *s1 = lerp(*s1, g, k, far);
    (void)s2;
    return p + (minus_lr * g) / (sqrtf(square - mean * mean) + eps);
}

RULE(rmsprop_momentum_centered) {
    float minus_lr = c[0], alpha = c[1], rest = c[2], eps = c[3], momentum = c[4], k = c[5], far = c[6];
    float square = *s0 = mean_square(*s0, g, alpha, rest);
    float mean = *s2 = lerp(*s2, g, k, far);
    float buffer = *s1 = *s1 * momentum + g / (sqrtf(square - mean * mean) + eps);
    return p + minus_lr * buffer;
}

RULE(asgd) {
    float minus_eta = c[0], averaging = c[1], mu = c[2];
    p = p + minus_eta * g;
    *s0 = averaging != 0.0f ? *s0 + (p - *s0) * mu : p;
    (void)s1, (void)s2;
    return p;
}

RULE(rprop) {
    float shrink = c[0], grow = c[1], smallest = c[2], largest = c[3];
    float turn = g * *s0;
    float size = *s1 * (turn > 0.0f ? grow : turn < 0.0f ? shrink : 1.0f);
    size = size < smallest ? smallest : size;
    size = size > largest ? largest : size;
    float direction = turn < 0.0f ? 0.0f : g;
    *s0 = direction;
    *s1 = size;
    (void)s2;
    return p - sign(direction) * size;
}

RULE(lion) {
    float k1 = c[0], far1 = c[1], k2 = c[2], far2 = c[3], minus_lr = c[4];
    float mean = *s0;
    *s0 = lerp(mean, g, k2, far2);
    (void)s1, (void)s2;
    return p + minus_lr * sign(lerp(mean, g, k1, far1));
}

/* -- runs ------------------------------------------------------------------------------------- */

/* A run of n elements: hetero/train/update/kernel.py fills it in. */
typedef struct {
    long long n;
    int layout, kind; /* of the gradient */
    uint16_t *hi;
    void *low;
    const void *grad;
    float *states[3]; /* null where the rule keeps fewer */
    /* Two factors of the gradient, 1 or -1 (maximize) as a third; weight decay: couple joins the
     * gradient, unless it is 0 (an infinite p must not make NaN), and shrink scales the master. */
    float factors[2], sign, couple, shrink;
    float own[16]; /* the rule's */
} job;

#ifndef __CUDACC__

/* -- on the CPU: loops ------------------------------------------------------------------------ */

/* A gradient is multiplied by two factors, one after the other. */
typedef void loop(uint16_t *restrict hi, void *restrict low, const void *restrict grad, float f0,
                  float f1, float *restrict s0, float *restrict s1, float *restrict s2, float shrink,
                  const float *restrict c, int64_t n);

#define LOOP(name, layout, low_type, kind, grad_type)                                              \
    CLONES static void name##_##layout##_##kind(                                                   \
        uint16_t *restrict hi, void *restrict low, const void *restrict grad, float f0, float f1,  \
        float *restrict s0, float *restrict s1, float *restrict s2, float shrink,                  \
        const float *restrict c, int64_t n) {                                                      \
        low_type *restrict lo = low;                                                               \
        const grad_type *restrict g = grad;                                                        \
        for (int64_t i = 0; i < n; i++) {                                                          \
            float p = layout##_load(hi[i], lo[i]) * shrink;                                        \
            p = name(p, from_##kind(g[i]) * f0 * f1, s0 + i, s1 + i, s2 + i, c);                   \
            layout##_store(hi + i, lo + i, p);                                                     \
        }                                                                                          \
    }

#define UNPACK(kind, grad_type)                                                                    \
    CLONES static void unpack_##kind(float *restrict g, const void *restrict grad, float f0,       \
                                     float f1, int n) {                                            \
        const grad_type *restrict x = grad;                                                        \
        for (int i = 0; i < n; i++) g[i] = from_##kind(x[i]) * f0 * f1;                            \
    }

UNPACK(bfloat, uint16_t)
UNPACK(half, uint16_t)
UNPACK(float, float)

/* Weight decay that joins the gradient. */
#define COUPLE(layout, low_type)                                                                   \
    CLONES static void couple_##layout(float *restrict g, const uint16_t *restrict hi,             \
                                       const void *restrict low, float couple, int n) {            \
        const low_type *restrict lo = low;                                                         \
        for (int i = 0; i < n; i++) g[i] = g[i] + couple * layout##_load(hi[i], lo[i]);            \
    }

COUPLE(split, int16_t)
COUPLE(whole, float)

/* Make the gradients of [at, at + n) fp32, and let weight decay join them. */
static void gather(float *g, const job *j, int64_t at, int n) {
    float f0 = j->factors[0] * j->sign, f1 = j->factors[1];
    const uint16_t *narrow = (const uint16_t *)j->grad + at;
    if (j->kind == BFLOAT16)
        unpack_bfloat(g, narrow, f0, f1, n);
    else if (j->kind == FLOAT16)
        unpack_half(g, narrow, f0, f1, n);
    else
        unpack_float(g, (const float *)j->grad + at, f0, f1, n);
    if (j->couple != 0.0f && j->layout == SPLIT)
        couple_split(g, j->hi + at, (int16_t *)j->low + at, j->couple, n);
    else if (j->couple != 0.0f)
        couple_whole(g, j->hi + at, (float *)j->low + at, j->couple, n);
}

/* `narrow` takes gradients of the working weight's type, `wide` takes fp32. */
static void run(loop *narrow, loop *wide, const job *j) {
    int64_t low_bytes = j->layout == SPLIT ? sizeof(int16_t) : sizeof(float);
    int own_kind = j->layout == SPLIT ? BFLOAT16 : FLOAT16;
    float g[BLOCK], *s[3];
    for (int i = 0; i < 3; i++) s[i] = j->states[i] ? j->states[i] : j->low; /* never touched */
    if (j->couple == 0.0f && (j->kind == own_kind || j->kind == FLOAT32)) {
        loop *step = j->kind == FLOAT32 ? wide : narrow;
        step(j->hi, j->low, j->grad, j->factors[0] * j->sign, j->factors[1], s[0], s[1], s[2],
             j->shrink, j->own, j->n);
        return;
    }
    for (int64_t at = 0; at < j->n; at += BLOCK) {
        int n = (int)(j->n - at < BLOCK ? j->n - at : BLOCK);
        gather(g, j, at, n);
        wide(j->hi + at, (char *)j->low + at * low_bytes, g, 1.0f, 1.0f, s[0] + at, s[1] + at,
             s[2] + at, j->shrink, j->own, n);
    }
}

#define LOOPS(name)                                                                                \
    LOOP(name, split, int16_t, bfloat, uint16_t)                                                   \
    LOOP(name, split, int16_t, float, float)                                                       \
    LOOP(name, whole, float, half, uint16_t)                                                       \
    LOOP(name, whole, float, float, float)                                                         \
    EXPORT void hetero_##name(const job *j) {                                                      \
        if (j->layout == SPLIT)                                                                    \
            run(name##_split_bfloat, name##_split_float, j);                                       \
        else                                                                                       \
            run(name##_whole_half, name##_whole_float, j);                                         \
    }

LOOPS(sgd)
LOOPS(sgd_momentum)
LOOPS(adam)
LOOPS(adam_amsgrad)
LOOPS(nadam)
LOOPS(radam)
LOOPS(adamax)
LOOPS(adagrad)
LOOPS(adadelta)
LOOPS(rmsprop)
LOOPS(rmsprop_momentum)
LOOPS(rmsprop_centered)
LOOPS(rmsprop_momentum_centered)
LOOPS(asgd)
LOOPS(rprop)
LOOPS(lion)

/* Update what is left of a job, `size` elements at a time: threads that call this with the same
 * `next`, which begins at 0, share it. */
EXPORT void hetero_share(void (*rule)(const job *), const job *whole, int64_t size, int64_t *next) {
    int64_t low_bytes = whole->layout == SPLIT ? sizeof(int16_t) : sizeof(float);
    int64_t grad_bytes = whole->kind == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    int64_t at;
    while ((at = __atomic_fetch_add(next, size, __ATOMIC_RELAXED)) < whole->n) {
        job part = *whole;
        part.n = whole->n - at < size ? whole->n - at : size;
        part.hi += at;
        part.low = (char *)whole->low + at * low_bytes;
        part.grad = (const char *)whole->grad + at * grad_bytes;
        for (int i = 0; i < 3; i++)
            if (part.states[i]) part.states[i] += at;
        rule(&part);
    }
}

/* What hetero/train/update/kernel.py compares before it calls anything above. */
EXPORT int hetero_abi(void) { return ABI; }

/* The CRC-32 of this file as it was compiled: tests see a library that is older than its source. */
EXPORT uint32_t hetero_source(void) { return HETERO_SOURCE; }

#else /* __CUDACC__ */

/* -- on a CUDA device: kernels ----------------------------------------------------------------- */

enum { THREADS = 256, QUAD = 4 }; /* of a block; elements of a thread: device_kernel.py knows both */

template <typename number> struct alignas(QUAD * sizeof(number)) quad {
    number at[QUAD];
};

template <typename number> INLINE bool has_quads(const number *run) {
    return (unsigned long long)run % sizeof(quad<number>) == 0;
}

template <typename number> INLINE quad<number> read(const number *run, long long i) {
    return *(const quad<number> *)(run + i);
}

template <typename number> INLINE void write(number *run, long long i, quad<number> value) {
    *(quad<number> *)(run + i) = value;
}

/* Update a run by `element`: in quads if every address allows it, then the rest one by one. Threads
 * that are neighbours work on neighbours. States that the rule does not keep have no memory. */
template <typename element, typename low_type, typename grad_type, int states>
INLINE void sweep(const job &j) {
    low_type *low = (low_type *)j.low;
    const grad_type *grad = (const grad_type *)j.grad;
    long long step = (long long)gridDim.x * blockDim.x;
    long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    bool aligned = has_quads(j.hi) && has_quads(low) && has_quads(grad);
    for (int k = 0; k < states; k++) aligned = aligned && has_quads(j.states[k]);
    long long end = aligned ? j.n / QUAD * QUAD : 0; /* of the quads */
    for (long long i = first * QUAD; i < end; i += step * QUAD) {
        quad<uint16_t> h = read(j.hi, i);
        quad<low_type> l = read(low, i);
        quad<grad_type> g = read(grad, i);
        quad<float> s[3];
        for (int k = 0; k < states; k++) s[k] = read(j.states[k], i);
        for (int e = 0; e < QUAD; e++)
            element::update(j, &h.at[e], &l.at[e], g.at[e], &s[0].at[e], &s[1].at[e], &s[2].at[e]);
        write(j.hi, i, h);
        write(low, i, l);
        for (int k = 0; k < states; k++) write(j.states[k], i, s[k]);
    }
    for (long long i = end + first; i < j.n; i += step) {
        float s[3];
        for (int k = 0; k < states; k++) s[k] = j.states[k][i];
        element::update(j, j.hi + i, low + i, grad[i], &s[0], &s[1], &s[2]);
        for (int k = 0; k < states; k++) j.states[k][i] = s[k];
    }
}

/* What the loops above do, and gather: flags are the same for all threads, so they may branch. */
#define KERNEL(name, layout, low_type, kind, grad_type, states)                                    \
    struct name##_##layout##_##kind##_element {                                                    \
        static __device__ __forceinline__ void update(const job &j, uint16_t *hi, low_type *lo,    \
                                                      grad_type grad, float *s0, float *s1,        \
                                                      float *s2) {                                 \
            float p = layout##_load(*hi, *lo);                                                     \
            float g = from_##kind(grad) * (j.factors[0] * j.sign) * j.factors[1];                  \
            if (j.couple != 0.0f) g = g + j.couple * p;                                            \
            layout##_store(hi, lo, name(p * j.shrink, g, s0, s1, s2, j.own));                      \
        }                                                                                          \
    };                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_##layout##_##kind(const job j) {  \
        sweep<name##_##layout##_##kind##_element, low_type, grad_type, states>(j);                 \
    }

#endif
