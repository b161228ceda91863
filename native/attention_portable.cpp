// Attention on vector extensions, over blocks of any codec and any head size that is a multiple of 16. Queries and probabilities
// stay f32 here.
#include "attention_step.h"
#include "simd16.h"
#include "turn.h"

#ifndef TENURE_KERNELS
#define TENURE_KERNELS portable
#endif

namespace tenure::TENURE_KERNELS {
namespace {

constexpr int kRows = 4;  // rows that share one pass over a tile

struct Rows {
    const float* q[kRows];
    int from[kRows];   // tokens of the step it is too late to see; may be <= 0 or > 64
    int limit[kRows];  // tokens of the step that are not too early for it; likewise
    int first;         // index of the first row in the part
};

// K of element d and 16 tokens, and V of one token and 16 elements.
template <Codec codec>
struct Tile;

template <>
struct Tile<Codec::f32> {
    template <int R>
    static void scores(const uint8_t* tile, int head_dim, const Rows& rows, f32x16* out) {
        f32x16 sum[R] = {};
        for (int d = 0; d < head_dim; d++) {
            const auto k = load<f32x16>(tile + 64 * d);
            for (int r = 0; r < R; r++) sum[r] = madd(k, splat(rows.q[r][d]), sum[r]);
        }
        for (int r = 0; r < R; r++) out[r] = sum[r];
    }
    template <int R>
    static void values(const uint8_t* tile, int tokens, int head_dim, int column, const float (*p)[kStepTokens],
                       f32x16* sum) {
        const uint8_t* v = tile + 4 * (kTileTokens * head_dim + column);
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < R; r++)
                sum[r] = madd(load<f32x16>(v + 4 * t * head_dim), splat(p[r][t]), sum[r]);
    }
};

template <>
struct Tile<Codec::bf16> {
    template <int R>
    static void scores(const uint8_t* tile, int head_dim, const Rows& rows, f32x16* out) {
        f32x16 sum[R] = {};
        for (int d = 0; d < head_dim; d += 2) {
            const auto pair = load<u32x16>(tile + 32 * d);
            for (int r = 0; r < R; r++) {
                sum[r] = madd(low_bf16(pair), splat(rows.q[r][d]), sum[r]);
                sum[r] = madd(high_bf16(pair), splat(rows.q[r][d + 1]), sum[r]);
            }
        }
        for (int r = 0; r < R; r++) out[r] = sum[r];
    }
    template <int R>
    static void values(const uint8_t* tile, int tokens, int head_dim, int column, const float (*p)[kStepTokens],
                       f32x16* sum) {
        const uint8_t* v = tile + 2 * kTileTokens * head_dim + 4 * column;
        for (int t = 0; t < tokens; t += 2) {
            const auto pair = load<u32x16>(v + 2 * t * head_dim);
            for (int r = 0; r < R; r++) {
                sum[r] = madd(low_bf16(pair), splat(p[r][t]), sum[r]);
                if (t + 1 < tokens) sum[r] = madd(high_bf16(pair), splat(p[r][t + 1]), sum[r]);
            }
        }
    }
};

// Keeps the lanes [from, to).
TENURE_INLINE f32x16 mask_lanes(f32x16 x, int from, int to, float otherwise) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const i32x16 seen = (lane < (to - (i32x16){})) & (lane >= (from - (i32x16){}));
    return seen ? x : splat(otherwise);
}

// The running softmax of one row takes in 64 scores; leaves the probabilities in p.
// `turned`: another sum like o.
void absorb(const f32x16* score, int from, int limit, int head_dim, float* o, float* turned, float& m, f32x16& l,
            const float* v_scale, float* p) {
    f32x16 s[kTilesPerStep], top = splat(kLowest);
    for (int i = 0; i < kTilesPerStep; i++) {
        s[i] = mask_lanes(score[i], from - kTileTokens * i, limit - kTileTokens * i, kLowest);
        top = vmax(s[i], top);
    }
    const float highest = max_lanes(top);
    if (highest > m + kSlack) {
        const f32x16 shrink = exp2_lanes(splat(m - highest));
        m = highest;
        l = l * shrink;
        for (int d = 0; d < head_dim; d += 16) store(o + d, load<f32x16>(o + d) * shrink);
        for (int d = 0; turned && d < head_dim; d += 16) store(turned + d, load<f32x16>(turned + d) * shrink);
    }
    for (int i = 0; i < kTilesPerStep; i++) {
        const int at = kTileTokens * i;
        const f32x16 e = mask_lanes(exp2_lanes(s[i] - splat(m)), from - at, limit - at, 0.0f);
        l = l + e;
        store(p + at, v_scale ? e * load<f32x16>(v_scale + at) : e);
    }
}

struct Work {
    f32x16* l;      // [rows] lane sums
    float* turned;  // [rows][head_dim] sums of turned V; null: there are none
    float soft_cap;
};

// o[R][head_dim] += p V of the tiles [first, end).
template <Codec codec, int R>
void weigh(const StepTiles& step, int first, int end, const float (*p)[kStepTokens], int head_dim, float* o) {
    for (int column = 0; column < head_dim; column += 16) {
        f32x16 sum[R];
        for (int r = 0; r < R; r++) sum[r] = load<f32x16>(o + r * head_dim + column);
        for (int i = first; i < end; i++) {
            const int left = step.tokens - i * kTileTokens;
            const auto* tile_p = reinterpret_cast<const float(*)[kStepTokens]>(&p[0][i * kTileTokens]);
            Tile<codec>::template values<R>(step.tile[i], left < kTileTokens ? left : kTileTokens, head_dim, column,
                                            tile_p, sum);
        }
        for (int r = 0; r < R; r++) store(o + r * head_dim + column, sum[r]);
    }
}

template <Codec codec, int R>
void step_rows(const StepTiles& step, const Rows& rows, const Part& part, const Work& work, int head_dim) {
    f32x16 score[kTilesPerStep][R];
    for (int i = 0; i < kTilesPerStep; i++) {
        Tile<codec>::template scores<R>(step.tile[i], head_dim, rows, score[i]);
        if (step.k_scale)
            for (int r = 0; r < R; r++) score[i][r] = score[i][r] * load<f32x16>(step.k_scale + kTileTokens * i);
        if (work.soft_cap > 0.0f)
            for (int r = 0; r < R; r++) score[i][r] = squash(score[i][r], work.soft_cap);
    }
    alignas(64) float p[R][kStepTokens];
    float *o = part.o + rows.first * head_dim, *turned = work.turned ? work.turned + rows.first * head_dim : nullptr;
    for (int r = 0; r < R; r++) {
        f32x16 mine[kTilesPerStep];
        for (int i = 0; i < kTilesPerStep; i++) mine[i] = score[i][r];
        const int row = rows.first + r;
        absorb(mine, rows.from[r], rows.limit[r], head_dim, o + r * head_dim, turned ? turned + r * head_dim : nullptr,
               part.m[row], work.l[row], step.v_scale, p[r]);
    }
    for (int i = step.first; i < step.tiles;) {
        const bool turns = step.turned[i / (kTilesPerStep / kBlocksPerStep)];
        int end = i + 1;
        while (end < step.tiles && step.turned[end / (kTilesPerStep / kBlocksPerStep)] == turns) end++;
        weigh<codec, R>(step, i, end, p, head_dim, turns ? turned : o);
        i = end;
    }
}

template <Codec codec>
void span_rows(const Span& span, const StepTiles& step, const Part& part, const Work& work) {
    for (int row = 0; row < span.rows; row += kRows) {
        Rows rows;
        const int count = span.rows - row < kRows ? span.rows - row : kRows;
        rows.first = row;
        for (int r = 0; r < count; r++) {
            rows.q[r] = span.query(row + r);
            rows.from[r] = span.first_seen(row + r) - step.begin;
            rows.limit[r] = span.visible_to(row + r) - step.begin;
        }
        if (rows.limit[count - 1] <= 0 || rows.from[0] >= kStepTokens) continue;
        switch (count) {
            case 1: step_rows<codec, 1>(step, rows, part, work, span.head_dim); break;
            case 2: step_rows<codec, 2>(step, rows, part, work, span.head_dim); break;
            case 3: step_rows<codec, 3>(step, rows, part, work, span.head_dim); break;
            default: step_rows<codec, 4>(step, rows, part, work, span.head_dim); break;
        }
    }
}

struct Scratch {
    StepScratch step;
    f32x16 l[kMaxTileRows];
    float turned[kMaxTileRows * kMaxHeadDim];
};
static_assert(sizeof(Scratch) <= span_scratch_bytes());

// What was summed turned, turned back.
void turn_back(const Span& span, const Part& part, float* turned) {
    for (int r = 0; r < span.rows; r++, turned += span.head_dim) {
        float* o = part.o + r * span.head_dim;
        turn(turned, span.head_dim);
        for (int d = 0; d < span.head_dim; d += 16) store(o + d, load<f32x16>(o + d) + load<f32x16>(turned + d));
    }
}

template <Codec codec>
void span(const Span& span, const Part& part, void* memory) {
    auto& scratch = *static_cast<Scratch*>(memory);
    Work work{scratch.l, nullptr, span.soft_cap};
    for (int r = 0; r < span.rows; r++) {
        part.m[r] = kLowest;
        work.l[r] = f32x16{};
    }
    std::memset(part.o, 0, sizeof(float) * span.rows * span.head_dim);
    const int end = span.seen_end();
    for (int begin = span.first_step(); begin < end; begin += kStepTokens) {
        const StepTiles step = step_at(span, begin, end, codec_table, scratch.step);
        if ((step.turned[0] || step.turned[1]) && !work.turned) {
            work.turned = scratch.turned;
            std::memset(work.turned, 0, sizeof(float) * span.rows * span.head_dim);
        }
        span_rows<codec>(span, step, part, work);
    }
    if (work.turned) turn_back(span, part, work.turned);
    for (int r = 0; r < span.rows; r++) part.l[r] = sum_lanes(work.l[r]);
}

void fold(const Part& into, const Part& from, int rows, int head_dim) {
    for (int r = 0; r < rows; r++) {
        if (from.l[r] == 0.0f) continue;
        const bool keeps = into.m[r] >= from.m[r];  // the running maximum
        const float high = keeps ? into.m[r] : from.m[r], low = keeps ? from.m[r] : into.m[r];
        const f32x16 one = splat(1.0f), shrink = exp2_lanes(splat(low - high));
        const f32x16 a = keeps ? one : shrink, b = keeps ? shrink : one;
        into.m[r] = high;
        into.l[r] = into.l[r] * a[0] + from.l[r] * b[0];
        float* o = into.o + r * head_dim;
        for (int d = 0; d < head_dim; d += 16)
            store(o + d, load<f32x16>(o + d) * a + load<f32x16>(from.o + r * head_dim + d) * b);
    }
}

void finish(const Part& part, int rows, int group, int head_dim, float* out, int64_t out_stride) {
    for (int r = 0; r < rows; r++) {
        const f32x16 scale = splat(1.0f / part.l[r]);
        float* to = out + r / group * out_stride + r % group * head_dim;
        // + 0: a zero that masked tokens were added to is +0 and one they were not may be -0.
        for (int d = 0; d < head_dim; d += 16)
            store(to + d, load<f32x16>(part.o + r * head_dim + d) * scale + f32x16{});
    }
}

}  // namespace

#if defined(__AVX512BF16__)
void span_bf16(const Span& span, const Part& part, void* scratch);  // attention_avx512.cpp
#define SPAN_BF16 span_bf16
#else
#define SPAN_BF16 span<Codec::bf16>
#endif

extern const AttentionKernels attention_table;
const AttentionKernels attention_table = {{SPAN_BF16, span<Codec::f32>}, fold, finish};

}  // namespace tenure::TENURE_KERNELS
