/* One update of an fp32 master from a gradient, in one pass over memory.
 *
 * hetero/train/formulas.py holds the same arithmetic in torch operations, and the two must agree bit
 * for bit: every operation is IEEE binary32, rounded to nearest by itself, in the order written here.
 * So this file is compiled without contraction to fused multiply-adds and without fast-math (the
 * flags are in hatch_build.py). A vector lane computes what a scalar does: the instruction set is
 * free, and chosen when the library is loaded.
 *
 * A rule is a function of one element, and LOOPS makes it a loop for each master layout. Gradients
 * are made fp32 before it, in blocks that stay in L1; all else is read and written in that one loop,
 * so that memory works while the divisions are computed. Nothing in it may branch, or it would not
 * vectorise: a flag selects, and where it would cost arithmetic or a state there are two rules.
 *
 * Master layouts:
 *   split (bf16)  master bits = (hi << 16) + lo, with hi the working weight and lo signed: hi is the
 *                 master rounded to nearest, ties away from zero; NaN is hi 0x7fc0, lo 0
 *   whole (fp16)  lo is the master, and hi, the working weight, is it rounded to nearest, ties to even
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

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

enum { ABI = 1, BLOCK = 1024, COMMON = 5 };
enum layout { SPLIT = 0, WHOLE = 1 };
enum grad_kind { BFLOAT16 = 0, FLOAT16 = 1, FLOAT32 = 2 };

/* -- numbers --------------------------------------------------------------------------------- */

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bfloat(uint16_t half) { return from_bits((uint32_t)half << 16); }

/* Return an fp16 as a float: selections rather than branches, so that it vectorises without F16C. */
static inline float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    uint32_t tiny = to_bits((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t bits = (magnitude << 13) + (magnitude >= 0x7c00u ? 224u << 23 : 112u << 23);
    return from_bits(sign | (magnitude < 0x400u ? tiny : bits));
}

/* Return a float as fp16, to nearest, ties to even; every NaN becomes 0x7e00 with its sign. */
static inline uint16_t to_half(float value) {
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    /* adding 0.5 aligns the bits to 2^-24, the smallest fp16, and rounds them on the way */
    uint32_t tiny = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
    uint32_t half = magnitude < 113u << 23 ? tiny : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (uint16_t)(sign | half);
}

/* -- gradients ------------------------------------------------------------------------------- */

#define UNPACK(kind, type, convert)                                                                \
    CLONES static void unpack_##kind(float *restrict g, const type *restrict grad, float f0,       \
                                     float f1, int n) {                                            \
        for (int i = 0; i < n; i++) g[i] = convert(grad[i]) * f0 * f1;                             \
    }

UNPACK(bfloat16, uint16_t, from_bfloat)
UNPACK(float16, uint16_t, from_half)
UNPACK(float32, float, )

/* -- masters --------------------------------------------------------------------------------- */

static inline float split_load(uint16_t hi, int16_t lo) {
    return from_bits(((uint32_t)hi << 16) + (uint32_t)(int32_t)lo);
}

static inline void split_store(uint16_t *hi, int16_t *lo, float p) {
    uint32_t bits = to_bits(p);
    bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
    *hi = (uint16_t)((bits + 0x8000u) >> 16);
    *lo = (int16_t)bits; /* bits - (hi << 16) fits, so it is the low half, read as signed */
}

static inline float whole_load(uint16_t hi, float lo) {
    (void)hi;
    return lo;
}

static inline void whole_store(uint16_t *hi, float *lo, float p) {
    *hi = to_half(p);
    *lo = p;
}

/* -- what the rules share -------------------------------------------------------------------- */

/* Return a + w * (b - a), or b - (b - a) * (1 - w) where w >= 1/2: k is w or -(1 - w). */
static inline float lerp(float a, float b, float k, float far) {
    return (far != 0.0f ? b : a) + k * (b - a);
}

/* Return a running mean of squares after one more of them. */
static inline float mean_square(float mean, float x, float keep, float rest) {
    return mean * keep + (rest * x) * x;
}

static inline float maximum(float a, float b) { /* NaN wins, as in torch.maximum */
    return a != a || a > b ? a : b;
}

static inline float sign(float x) { return (float)((x > 0.0f) - (x < 0.0f)); }

/* -- the rules: formulas.py names the same coefficients in the same order --------------------- */

/* Return p after one update by gradient g. s0, s1 and s2 are the element's states in torch's order;
 * those that the rule does not keep must not be touched. */
#define RULE(name)                                                                                 \
    static inline float name(float p, float g, float *restrict s0, float *restrict s1,             \
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

/* -- loops ------------------------------------------------------------------------------------ */

typedef void loop(uint16_t *restrict, void *restrict, const float *restrict, float *restrict,
                  float *restrict, float *restrict, const float *restrict, int);
typedef void coupling(float *restrict, const uint16_t *restrict, const void *restrict, float, int);

/* Weight decay that joins the gradient. */
#define COUPLE(layout, type)                                                                       \
    CLONES static void couple_##layout(float *restrict g, const uint16_t *restrict hi,             \
                                       const void *restrict low, float couple, int n) {            \
        const type *restrict lo = low;                                                             \
        for (int i = 0; i < n; i++) g[i] = g[i] + couple * layout##_load(hi[i], lo[i]);            \
    }

COUPLE(split, int16_t)
COUPLE(whole, float)

#define LOOP(name, layout, type)                                                                   \
    CLONES static void name##_##layout(uint16_t *restrict hi, void *restrict low,                  \
                                       const float *restrict g, float *restrict s0,                \
                                       float *restrict s1, float *restrict s2,                     \
                                       const float *restrict c, int n) {                           \
        type *restrict lo = low;                                                                   \
        float shrink = c[4];                                                                       \
        for (int i = 0; i < n; i++) {                                                              \
            float p = layout##_load(hi[i], lo[i]) * shrink;                                        \
            p = name(p, g[i], s0 + i, s1 + i, s2 + i, c + COMMON);                                 \
            layout##_store(hi + i, lo + i, p);                                                     \
        }                                                                                          \
    }

static void unpack(float *g, const void *grad, int kind, int64_t at, const float *c, int n) {
    float f0 = c[0] * c[2], f1 = c[1]; /* c[2] is 1 or -1 (maximize): exact wherever it comes in */
    if (kind == BFLOAT16)
        unpack_bfloat16(g, (const uint16_t *)grad + at, f0, f1, n);
    else if (kind == FLOAT16)
        unpack_float16(g, (const uint16_t *)grad + at, f0, f1, n);
    else
        unpack_float32(g, (const float *)grad + at, f0, f1, n);
}

/* Update `count` elements. `states` are three pointers, null where the rule keeps fewer. The first
 * COMMON coefficients are two factors of the gradient, its sign, and weight decay: `couple` joins the
 * gradient, `shrink` scales the master. The others are the rule's. */
static void run(loop *step, coupling *couple, int64_t count, uint16_t *hi, char *low, int low_bytes,
                int kind, const void *grad, float *const *states, const float *c) {
    float g[BLOCK];
    for (int64_t at = 0; at < count; at += BLOCK) {
        int n = (int)(count - at < BLOCK ? count - at : BLOCK);
        char *lo = low + at * low_bytes;
        float *s[3];
        for (int i = 0; i < 3; i++) s[i] = states[i] ? states[i] + at : g; /* g: never touched */
        unpack(g, grad, kind, at, c, n);
        if (c[3] != 0.0f) couple(g, hi + at, lo, c[3], n); /* else an infinite p would make NaN */
        step(hi + at, lo, g, s[0], s[1], s[2], c, n);
    }
}

#define LOOPS(name)                                                                                \
    LOOP(name, split, int16_t)                                                                     \
    LOOP(name, whole, float)                                                                       \
    EXPORT void hetero_##name(int64_t count, int layout, uint16_t *hi, void *low, int kind,        \
                              const void *grad, float *const *states, const float *c) {            \
        if (layout == SPLIT)                                                                       \
            run(name##_split, couple_split, count, hi, low, 2, kind, grad, states, c);             \
        else                                                                                       \
            run(name##_whole, couple_whole, count, hi, low, 4, kind, grad, states, c);             \
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

/* What hetero/train/kernel.py compares before it calls anything above. */
EXPORT int hetero_abi(void) { return ABI; }

/* The CRC-32 of this file as it was compiled: tests see a library that is older than its source. */
EXPORT uint32_t hetero_source(void) { return HETERO_SOURCE; }
