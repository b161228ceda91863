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
    const float *q[kRows], *turned_q[kRows];
    int from[kRows];   // tokens of the step it is too late to see; may be <= 0 or > 64
    int limit[kRows];  // tokens of the step that are not too early for it; likewise
    int first;         // index of the first row in the part
};

constexpr int kPieces = kTileTokens / kLanes;  // registers that hold one f32 of each token of a tile

// Sums of R rows, kept in registers: of the 16 tokens of a tile or of 16 elements of V.
template <int R>
struct Sums {
    f32xn of[R][kPieces];

    [[gnu::always_inline]] void clear() {
        for (int r = 0; r < R; r++)
            for (int i = 0; i < kPieces; i++) of[r][i] = f32xn{};
    }
    [[gnu::always_inline]] void read(const float* from, int stride) {
        for (int r = 0; r < R; r++)
            for (int i = 0; i < kPieces; i++) of[r][i] = load<f32xn>(from + r * stride + i * kLanes);
    }
    [[gnu::always_inline]] void write(float* to, int stride) const {
        for (int r = 0; r < R; r++)
            for (int i = 0; i < kPieces; i++) store(to + r * stride + i * kLanes, of[r][i]);
    }
    // += x[16] * factor[r][at]
    template <class Piece, class Factors>
    [[gnu::always_inline]] void add(Piece piece, const Factors& factor, int at) {
        f32xn x[kPieces];
        for (int i = 0; i < kPieces; i++) x[i] = piece(i);
        for (int r = 0; r < R; r++) {
            const f32xn y = splat<f32xn>(factor[r][at]);
            for (int i = 0; i < kPieces; i++) of[r][i] = madd(x[i], y, of[r][i]);
        }
    }
};

// K of element d and 16 tokens, and V of one token and 16 elements.
template <Codec codec>
struct Tile;

template <>
struct Tile<Codec::f32> {
    template <int R>
    TENURE_INLINE void scores(const uint8_t* tile, int head_dim, const float* const* q, Sums<R>& sums) {
        for (int d = 0; d < head_dim; d++)
            sums.add([&](int i) { return load<f32xn>(tile + 64 * d + 4 * kLanes * i); }, q, d);
    }
    template <int R>
    TENURE_INLINE void values(const uint8_t* tile, int tokens, int head_dim, int column, const float* const* p,
                              Sums<R>& sums) {
        const uint8_t* v = tile + 4 * (kTileTokens * head_dim + column);
        for (int t = 0; t < tokens; t++)
            sums.add([&](int i) { return load<f32xn>(v + 4 * t * head_dim + 4 * kLanes * i); }, p, t);
    }
};

template <>
struct Tile<Codec::bf16> {
    template <int R>
    TENURE_INLINE void scores(const uint8_t* tile, int head_dim, const float* const* q, Sums<R>& sums) {
        for (int d = 0; d < head_dim; d += 2) {
            const auto pair = [&](int i) { return load<u32xn>(tile + 32 * d + 4 * kLanes * i); };
            sums.add([&](int i) { return low_bf16(pair(i)); }, q, d);
            sums.add([&](int i) { return high_bf16(pair(i)); }, q, d + 1);
        }
    }
    template <int R>
    TENURE_INLINE void values(const uint8_t* tile, int tokens, int head_dim, int column, const float* const* p,
                              Sums<R>& sums) {
        const uint8_t* v = tile + 2 * kTileTokens * head_dim + 4 * column;
        for (int t = 0; t < tokens; t += 2) {
            const auto pair = [&](int i) { return load<u32xn>(v + 2 * t * head_dim + 4 * kLanes * i); };
            sums.add([&](int i) { return low_bf16(pair(i)); }, p, t);
            if (t + 1 < tokens) sums.add([&](int i) { return high_bf16(pair(i)); }, p, t + 1);
        }
    }
};

constexpr int32_t kLane[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Keeps the lanes [from, to).
TENURE_INLINE f32xn mask_lanes(f32xn x, int from, int to, float otherwise) {
    const auto lane = load<i32xn>(kLane);
    const i32xn seen = (lane < (to - (i32xn){})) & (lane >= (from - (i32xn){}));
    return seen ? x : splat<f32xn>(otherwise);
}

TENURE_INLINE void scale(float* x, int n, f32xn factor) {
    for (int i = 0; i < n; i += kLanes) store(x + i, load<f32xn>(x + i) * factor);
}

// The running softmax of one row takes in 64 scores; leaves the probabilities in p.
// `turned`: another sum like o.
void absorb(const float* score, int from, int limit, int head_dim, float* o, float* turned, float& m, float* l,
            const float* v_scale, float* p) {
    f32xn s[kStepTokens / kLanes], top = splat<f32xn>(kLowest);
    for (int i = 0; i < kStepTokens / kLanes; i++) {
        s[i] = mask_lanes(load<f32xn>(score + kLanes * i), from - kLanes * i, limit - kLanes * i, kLowest);
        top = vmax(s[i], top);
    }
    const float highest = max_lanes(top);
    if (highest > m + kSlack) {
        const f32xn shrink = exp2_lanes(splat<f32xn>(m - highest));
        m = highest;
        scale(l, kTileTokens, shrink);
        scale(o, head_dim, shrink);
        if (turned) scale(turned, head_dim, shrink);
    }
    for (int i = 0; i < kStepTokens / kLanes; i++) {
        const int at = kLanes * i;
        const f32xn e = mask_lanes(exp2_lanes(s[i] - splat<f32xn>(m)), from - at, limit - at, 0.0f);
        float* sum = l + at % kTileTokens;
        store(sum, load<f32xn>(sum) + e);
        store(p + at, v_scale ? e * load<f32xn>(v_scale + at) : e);
    }
}

struct Work {
    float* l;       // [rows][16] lane sums
    float* turned;    // [rows][head_dim] sums of turned V; null: there are none
    float* turned_q;  // [rows][head_dim] for turned K; likewise
    float soft_cap;
};

// o[R][head_dim] += p V of the tiles [first, end).
template <Codec codec, int R>
void weigh(const StepTiles& step, int first, int end, const float (*p)[kStepTokens], int head_dim, float* o) {
    for (int column = 0; column < head_dim; column += kTileTokens) {
        Sums<R> sums;
        sums.read(o + column, head_dim);
        for (int i = first; i < end; i++) {
            const int left = step.tokens - i * kTileTokens;
            const float* tile_p[R];
            for (int r = 0; r < R; r++) tile_p[r] = p[r] + i * kTileTokens;
            Tile<codec>::template values<R>(step.tile[i], left < kTileTokens ? left : kTileTokens, head_dim, column,
                                            tile_p, sums);
        }
        sums.write(o + column, head_dim);
    }
}

// What is left to do to the 64 scores of a row: the scales of tokens, the cap.
TENURE_INLINE void adjust(float* score, const float* k_scale, float soft_cap) {
    for (int i = 0; k_scale && i < kStepTokens; i += kLanes)
        store(score + i, load<f32xn>(score + i) * load<f32xn>(k_scale + i));
    for (int i = 0; soft_cap > 0.0f && i < kStepTokens; i += kLanes)
        store(score + i, squash(load<f32xn>(score + i), soft_cap));
}

template <Codec codec, int R>
void step_rows(const StepTiles& step, const Rows& rows, const Part& part, const Work& work, int head_dim) {
    alignas(64) float score[R][kStepTokens], p[R][kStepTokens];
    for (int i = 0; i < kTilesPerStep; i++) {
        Sums<R> sums;
        sums.clear();
        const bool turns = step.k_turned[i / (kTilesPerStep / kBlocksPerStep)];
        Tile<codec>::template scores<R>(step.tile[i], head_dim, turns ? rows.turned_q : rows.q, sums);
        sums.write(score[0] + kTileTokens * i, kStepTokens);
    }
    float *o = part.o + rows.first * head_dim, *turned = work.turned ? work.turned + rows.first * head_dim : nullptr;
    for (int r = 0; r < R; r++) {
        const int row = rows.first + r;
        adjust(score[r], step.k_scale, work.soft_cap);
        absorb(score[r], rows.from[r], rows.limit[r], head_dim, o + r * head_dim,
               turned ? turned + r * head_dim : nullptr, part.m[row], work.l + kTileTokens * row, step.v_scale, p[r]);
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
            rows.turned_q[r] = work.turned_q ? work.turned_q + (row + r) * span.head_dim : nullptr;
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
    float l[kMaxTileRows][kTileTokens];
    float turned[kMaxTileRows * kMaxHeadDim], turned_q[kMaxTileRows * kMaxHeadDim];
};
static_assert(sizeof(Scratch) <= span_scratch_bytes());

void turn_queries(const Span& span, float* turned) {
    for (int r = 0; r < span.rows; r++, turned += span.head_dim) {
        std::memcpy(turned, span.query(r), sizeof(float) * span.head_dim);
        turn(turned, span.head_dim);
    }
}

// What was summed turned, turned back.
void turn_back(const Span& span, const Part& part, float* turned) {
    for (int r = 0; r < span.rows; r++, turned += span.head_dim) {
        float* o = part.o + r * span.head_dim;
        turn(turned, span.head_dim);
        for (int d = 0; d < span.head_dim; d += kLanes) store(o + d, load<f32xn>(o + d) + load<f32xn>(turned + d));
    }
}

template <Codec codec>
void span(const Span& span, const Part& part, void* memory) {
    auto& scratch = *static_cast<Scratch*>(memory);
    Work work{scratch.l[0], nullptr, nullptr, span.soft_cap};
    for (int r = 0; r < span.rows; r++) part.m[r] = kLowest;
    std::memset(work.l, 0, sizeof(scratch.l[0]) * span.rows);
    std::memset(part.o, 0, sizeof(float) * span.rows * span.head_dim);
    const int end = span.seen_end();
    for (int begin = span.first_step(); begin < end; begin += kStepTokens) {
        const StepTiles step = step_at(span, begin, end, codec_table, scratch.step);
        if ((step.turned[0] || step.turned[1]) && !work.turned) {
            work.turned = scratch.turned;
            std::memset(work.turned, 0, sizeof(float) * span.rows * span.head_dim);
        }
        if ((step.k_turned[0] || step.k_turned[1]) && !work.turned_q) {
            work.turned_q = scratch.turned_q;
            turn_queries(span, work.turned_q);
        }
        span_rows<codec>(span, step, part, work);
    }
    if (work.turned) turn_back(span, part, work.turned);
    for (int r = 0; r < span.rows; r++) part.l[r] = sum_lanes(load<f32x16>(scratch.l[r]));
}

void fold(const Part& into, const Part& from, int rows, int head_dim) {
    for (int r = 0; r < rows; r++) {
        if (from.l[r] == 0.0f) continue;
        const bool keeps = into.m[r] >= from.m[r];  // the running maximum
        const float high = keeps ? into.m[r] : from.m[r], low = keeps ? from.m[r] : into.m[r];
        const f32xn one = splat<f32xn>(1.0f), shrink = exp2_lanes(splat<f32xn>(low - high));
        const f32xn a = keeps ? one : shrink, b = keeps ? shrink : one;
        into.m[r] = high;
        into.l[r] = into.l[r] * a[0] + from.l[r] * b[0];
        float* o = into.o + r * head_dim;
        for (int d = 0; d < head_dim; d += kLanes)
            store(o + d, load<f32xn>(o + d) * a + load<f32xn>(from.o + r * head_dim + d) * b);
    }
}

void finish(const Part& part, int rows, int group, int head_dim, float* out, int64_t out_stride) {
    for (int r = 0; r < rows; r++) {
        const f32xn scale = splat<f32xn>(1.0f / part.l[r]);
        float* to = out + r / group * out_stride + r % group * head_dim;
        // + 0: a zero that masked tokens were added to is +0 and one they were not may be -0.
        for (int d = 0; d < head_dim; d += kLanes)
            store(to + d, load<f32xn>(part.o + r * head_dim + d) * scale + f32xn{});
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
